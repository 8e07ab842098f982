"""Fair sharing: one chat with many or large calls must not delay the calls of all other chats.

In Redis, calls that wait for a worker are served in turns (``nekro.broker.delivery.fair_queue``); RabbitMQ
serves a queue in order. Each chat also has a maximum number of calls in flight; further calls wait in the
calling process, in order. A chat's calls with large arguments are spaced out, so that other chats get most of
a process's time.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS
from nekro_agent.errors import OverloadedError

__all__ = [
    "LARGE_CHARS",
    "WAITS",
    "ChatPace",
    "ChatShares",
]


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
                f"{self._waiting} calls are already waiting in this process; that is the limit of "
                "waiting calls; try again later"
            )
        self._waiting += 1
        try:
            await share.turns.acquire()
        finally:
            self._waiting -= 1


#: Senders space out messages with more characters of arguments. Verifying and parsing a shorter one
#: occupies a worker's loop for less time than an ordinary call.
LARGE_CHARS: Final = 64 << 10
#: Shorter work is not counted, because it delays other calls no more than an ordinary call.
_FREE_SECONDS: Final = 0.0005
#: A chat's next large call waits this many times as long as its previous ones occupied the process. Each
#: large call delays two or three calls of other chats; that must affect fewer than one in a hundred of them.
WAITS: Final = 50
#: Longest wait caused by one large call; all of them together cause at most ten times as much.
_MOST_SECONDS: Final = 3.0


class ChatPace:
    """Tracks the time that each chat's large calls take, and when its next one may start.

    Plugins process large arguments on the shared event loop, in a time that cannot be limited; but a chat
    that sends many large arguments can be slowed down. Small calls never wait.
    """

    def __init__(self, *, only_beside_others: bool) -> None:
        """
        Args:
            only_beside_others: whether a chat waits only while other chats are active in this process.
        """
        self._only_beside_others = only_beside_others
        #: When a chat's next large call may start, by ``time.monotonic``.
        self._free_at: dict[str, float] = {}
        #: The two chats with the most recent calls, each with the time of its last call.
        self._newest = self._second = ("", float("-inf"))

    def called(self, chat_key: str) -> None:
        """Record a call of any size."""
        if self._newest[0] != chat_key:
            self._second = self._newest
        self._newest = (chat_key, time.monotonic())

    async def turn(self, chat_key: str) -> None:
        """Wait until a chat may start its next large call."""
        # In a loop, because each of several waiting calls postpones the others when it starts.
        while (seconds := self._free_at.get(chat_key, 0.0) - time.monotonic()) > 0:
            if self._only_beside_others and not self._is_beside_others(chat_key):
                return
            await asyncio.sleep(min(seconds, POLL_SECONDS))

    def spent(self, chat_key: str, seconds: float) -> None:
        """Record how long a large call occupied the process; less than 0.5 ms is ignored."""
        if seconds < _FREE_SECONDS:
            return
        now = time.monotonic()
        if len(self._free_at) > 1000:
            self._free_at = {chat: at for chat, at in self._free_at.items() if at > now}
        wait = min(WAITS * seconds, _MOST_SECONDS)
        free_at = max(self._free_at.get(chat_key, 0.0), now) + wait
        self._free_at[chat_key] = min(free_at, now + 10 * _MOST_SECONDS)

    def _is_beside_others(self, chat_key: str) -> bool:
        chat, at = self._newest if self._newest[0] != chat_key else self._second
        return chat != chat_key and time.monotonic() - at < FRESH_SECONDS
