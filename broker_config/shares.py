"""Fair sharing: one chat with thousands of calls must not stand before all others in the queue.

A queue is served in order, so who fills it first is served first. Here each chat has a
number of calls under way at most; the others wait with their caller, in order, and the
next chat's call stands behind that number and not behind all of them.
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
    """One turn; ``async with`` it."""

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
    """The shares of all chats in one process; belongs to one event loop."""

    def __init__(self, *, per_chat: int, waiting: int) -> None:
        """Take the limits.

        Args:
            per_chat: calls of one chat that are under way at a time.
            waiting: calls of all chats that wait for their turn; more are refused. 0: any number.
        """
        self._per_chat, self._limit = per_chat, waiting
        self._shares: dict[str, _Share] = {}
        self._waiting = 0

    def turn(self, chat_key: str) -> AbstractAsyncContextManager[None]:
        """Wait for a chat's next turn and keep it.

        Raises:
            OverloadedError: too many wait already.
        """
        return _Turn(self, chat_key)

    def join(self, chat_key: str) -> _Share:
        """Use a chat's share, until ``leave``."""
        share = self._shares.get(chat_key)
        if share is None:
            share = self._shares[chat_key] = _Share(asyncio.Semaphore(self._per_chat))
        share.users += 1
        return share

    def leave(self, chat_key: str, share: _Share) -> None:
        """Use it no more; the last one takes it away."""
        share.users -= 1
        if not share.users:
            self._shares.pop(chat_key, None)

    async def acquire(self, share: _Share) -> None:
        """Wait for a turn."""
        # The first is seen at once; one that was cancelled is among the users until it runs.
        if share.users <= self._per_chat or not share.turns.locked():
            await share.turns.acquire()
            return
        if self._limit and self._waiting >= self._limit:
            raise OverloadedError(
                f"{self._waiting} calls wait in this process already; try again later, or raise "
                "NEKRO_BROKER__MAX_QUEUED or NEKRO_BROKER__CALLS_PER_CHAT"
            )
        self._waiting += 1
        try:
            await share.turns.acquire()
        finally:
            self._waiting -= 1
