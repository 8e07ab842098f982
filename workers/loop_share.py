"""Spaces out calls with large arguments, so that their work leaves most of the loop to others."""

from __future__ import annotations

import asyncio
import time
from typing import Final

__all__ = ["LoopShare"]

#: A chat's next call waits so many times as long as the last ones held the loop.
_WAITS: Final = 4
#: Longest wait that one call brings about.
_MOST_SECONDS: Final = 1.0


class LoopShare:
    """What the calls with large arguments of each chat did on one event loop.

    A coroutine of a plugin runs on the shared loop, and what ``str()`` of a large argument takes is the
    plugin's business. But a chat that sends one large argument after the other can be slowed down: it
    gets at most a fifth of the loop. Chats that send small arguments never wait.
    """

    def __init__(self) -> None:
        #: When a chat's next call may begin, by ``time.monotonic``; chats whose time has come are dropped.
        self._free_at: dict[str, float] = {}

    async def turn(self, chat_key: str) -> None:
        """Wait until a chat may begin its next call."""
        # In a loop, because calls that wait beside each other begin one after the other.
        while (seconds := self._free_at.get(chat_key, 0.0) - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(seconds)
        self._free_at.pop(chat_key, None)

    def spent(self, chat_key: str, seconds: float) -> None:
        """Count time for which a call held the loop."""
        wait = min(_WAITS * seconds, _MOST_SECONDS)
        now = time.monotonic()
        self._free_at[chat_key] = max(self._free_at.get(chat_key, 0.0), now) + wait
        if len(self._free_at) > 1000:
            self._free_at = {chat: at for chat, at in self._free_at.items() if at > now}
