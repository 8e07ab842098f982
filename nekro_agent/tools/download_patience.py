"""When a download tries again, and when it gives up."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from nekro_agent.errors import DownloadError
from nekro_agent.policies import DownloadPolicy

__all__ = ["Patience"]

_LONGEST_PAUSE_SECONDS: Final = 30.0


class Patience:
    """How often a transfer tries again: a number of tries in a row that bring nothing new."""

    def __init__(self, policy: DownloadPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._best = 0
        self._paused_until = 0.0
        #: A server that never answered is not asked again: the caller decides.
        self.has_answer = False

    async def after(self, reason: Exception, *, held_bytes: int) -> None:
        """Pause before the next try.

        Raises:
            DownloadError: there is none.
        """
        if held_bytes > self._best:
            self._best, self._failures = held_bytes, 0
        else:
            self._failures += 1
        if not self.has_answer or self._failures >= self._policy.tries:
            raise DownloadError(str(reason)) from reason
        pause = min(self._policy.retry_seconds * 2**self._failures, _LONGEST_PAUSE_SECONDS)
        # Connections that broke together pause together.
        self._paused_until = max(self._paused_until, time.monotonic() + pause)
        await asyncio.sleep(self._paused_until - time.monotonic())
