"""Spaces out a chat's calls with large arguments, so that other chats get most of a process's time."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS

__all__ = ["LARGE_CHARS", "WAITS", "ChatPace"]

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
        """Record the time for which a large call occupied the process; less than 0.5 ms is ignored."""
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
