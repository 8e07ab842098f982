"""Fair sharing: one chat with thousands of calls must not delay the calls of all other chats.

A queue is served in order, so a chat that fills it would be served first. Here each chat has a
maximum number of calls in flight; further calls wait in the calling process, in order. A call of
another chat then waits only behind that number of calls.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from nekro_agent.errors import OverloadedError

__all__ = ["ChatShares"]


@dataclass
class _Share:
    turns: asyncio.Semaphore
    users: int = 0


class _Turn:
    """One turn, as an async context manager."""

    __slots__ = ("_chat_key", "_share", "_shares")

    def __init__(self, shares: ChatShares, chat_key: str) -> None:
        self._shares, self._chat_key = shares, chat_key

    async def __aenter__(self) -> None:
        self._share = self._shares.join(self._chat_key)
        try:
            await self._shares.acquire(self._share)
        except BaseException:
            self._shares.leave(self._chat_key, self._share)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._share.turns.release()
        self._shares.leave(self._chat_key, self._share)


class ChatShares:
    """The shares of all chats in one process; used on one event loop."""

    def __init__(self, *, per_chat: int, waiting: int) -> None:
        """Set the limits.

        Args:
            per_chat: maximum number of calls of one chat in flight.
            waiting: maximum number of waiting calls of all chats; more are refused. 0 means no limit.
        """
        self._per_chat, self._limit = per_chat, waiting
        self._shares: dict[str, _Share] = {}
        self._waiting = 0

    def turn(self, chat_key: str) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits for a chat's next turn and holds it.

        Raises:
            OverloadedError: on entry, if too many calls are waiting.
        """
        return _Turn(self, chat_key)

    def join(self, chat_key: str) -> _Share:
        """Register a user of a chat's share, until ``leave``."""
        share = self._shares.get(chat_key)
        if share is None:
            share = self._shares[chat_key] = _Share(asyncio.Semaphore(self._per_chat))
        share.users += 1
        return share

    def leave(self, chat_key: str, share: _Share) -> None:
        """Unregister a user of a chat's share; the last one removes the share."""
        share.users -= 1
        if not share.users:
            self._shares.pop(chat_key, None)

    async def acquire(self, share: _Share) -> None:
        """Wait for a turn of a share."""
        # The first check is cheap; cancelled waiters count as users until their task runs.
        if share.users <= self._per_chat or not share.turns.locked():
            await share.turns.acquire()
            return
        if self._limit and self._waiting >= self._limit:
            raise OverloadedError(
                f"{self._waiting} calls are already waiting in this process; try again later, or raise "
                "NEKRO_BROKER__MAX_QUEUED or NEKRO_BROKER__CALLS_PER_CHAT"
            )
        self._waiting += 1
        try:
            await share.turns.acquire()
        finally:
            self._waiting -= 1
