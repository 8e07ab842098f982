"""Spaces out a chat's calls with large arguments, so that their work leaves most of a process to others."""

from __future__ import annotations

import asyncio
import time
from typing import Final

__all__ = ["LARGE_CHARS", "WAITS", "ChatPace"]

#: Messages with more characters of arguments are spaced out by their sender. Checking and parsing a shorter
#: one holds a worker's loop for less than an ordinary call does.
LARGE_CHARS: Final = 64 << 10
#: Work of less than this is not counted: it delays other calls no more than an ordinary call does.
_FREE_SECONDS: Final = 0.0005
#: A chat's next large call waits so many times as long as the last ones held the process. Each large
#: call delays two or three of another chat's calls; it must be fewer than one in a hundred of them.
WAITS: Final = 50
#: Longest wait that one piece of work brings about, and all of them together.
_MOST_SECONDS: Final = 3.0
_MOST_TOGETHER_SECONDS: Final = 30.0
#: A chat counts as active for so long after its last call.
_ACTIVE_SECONDS: Final = 1.0
#: How often it is looked whether others are still active.
_LOOK_SECONDS: Final = 0.05


class ChatPace:
    """What the large calls of each chat cost a process, and when its next one may begin.

    What ``str()`` of a large argument takes is a plugin's business, and it runs on the shared loop. But a
    chat that sends one large argument after the other can be slowed down. Small calls never wait.
    """

    def __init__(self, *, only_beside_others: bool) -> None:
        """
        Args:
            only_beside_others: whether a chat waits only while other chats call here, too.
        """
        self._only_beside_others = only_beside_others
        #: When a chat's next large call may begin, by ``time.monotonic``.
        self._free_at: dict[str, float] = {}
        #: The two chats that called last, each with the time of its last call.
        self._newest = self._second = ("", float("-inf"))

    def called(self, chat_key: str) -> None:
        """Take note of a call of any size."""
        if self._newest[0] != chat_key:
            self._second = self._newest
        self._newest = (chat_key, time.monotonic())

    async def turn(self, chat_key: str) -> None:
        """Wait until a chat may begin its next large call."""
        # In a loop, because calls that wait beside each other begin one after the other.
        while (seconds := self._free_at.get(chat_key, 0.0) - time.monotonic()) > 0:
            if self._only_beside_others and not self._is_beside_others(chat_key):
                return
            await asyncio.sleep(min(seconds, _LOOK_SECONDS))

    def spent(self, chat_key: str, seconds: float) -> None:
        """Count time for which a large call held the process; less than 0.5 ms count as none."""
        if seconds < _FREE_SECONDS:
            return
        now = time.monotonic()
        if len(self._free_at) > 1000:
            self._free_at = {chat: at for chat, at in self._free_at.items() if at > now}
        wait = min(WAITS * seconds, _MOST_SECONDS)
        free_at = max(self._free_at.get(chat_key, 0.0), now) + wait
        self._free_at[chat_key] = min(free_at, now + _MOST_TOGETHER_SECONDS)

    def _is_beside_others(self, chat_key: str) -> bool:
        chat, at = self._newest if self._newest[0] != chat_key else self._second
        return chat != chat_key and time.monotonic() - at < _ACTIVE_SECONDS
