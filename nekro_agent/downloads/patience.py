"""Decides when a download is retried and when it fails."""

from __future__ import annotations

import asyncio
import time

from nekro_agent.errors import DownloadError
from nekro_agent.policies import DownloadPolicy

__all__ = ["RetryLimit"]


class RetryLimit:
    """Limits consecutive attempts of a transfer that bring no new bytes."""

    def __init__(self, policy: DownloadPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._best = 0
        self._paused_until = 0.0
        #: A server that has never answered is not retried here; the caller decides.
        self.has_answer = False

    async def after(self, reason: Exception, *, held_bytes: int) -> None:
        """Pause before the next attempt.

        Raises:
            DownloadError: no further attempt is allowed.
        """
        if held_bytes > self._best:
            self._best, self._failures = held_bytes, 0
        else:
            self._failures += 1
        if not self.has_answer or self._failures >= self._policy.tries:
            raise DownloadError(str(reason)) from reason
        pause = self._policy.retry_seconds * 2**self._failures
        # Connections that broke at the same time share one pause.
        self._paused_until = max(self._paused_until, time.monotonic() + pause)
        await asyncio.sleep(self._paused_until - time.monotonic())
