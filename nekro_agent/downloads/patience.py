"""Decides when a download is retried and when it fails."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import DownloadError
from nekro_agent.policies import DownloadPolicy

__all__ = ["Interrupted", "RetryLimit", "stated_pause"]


class Interrupted(Exception):
    """The server could not be reached or broke off; the same request may succeed later."""

    def __init__(self, reason: str, *, status: int | None = None, pause_seconds: float | None = None) -> None:
        """
        Args:
            status: what the server answered; None if it did not.
            pause_seconds: after how long it wants to be asked again; None if it does not say.
        """
        super().__init__(reason)
        self.status = status
        self.pause_seconds = pause_seconds

    @property
    def is_busy(self) -> bool:
        """Whether the server works, and asks for another request later."""
        return self.status == HTTPStatus.TOO_MANY_REQUESTS or (
            self.status == HTTPStatus.SERVICE_UNAVAILABLE and self.pause_seconds is not None
        )


def stated_pause(header: str | None, *, now: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header: a number, or a date; None if it states none.

    Args:
        now: header ``Date`` of the answer, so that a wrong clock does not matter; None: this host's time.
    """
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    date = _date(text)
    if date is None:
        return None
    return max(0.0, (date - (_date(now) or datetime.now(UTC))).total_seconds())


def _date(text: str | None) -> datetime | None:
    try:
        date = parsedate_to_datetime(text or "")
    except (ValueError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


class RetryLimit:
    """Limits consecutive attempts of a transfer that bring no new bytes."""

    def __init__(self, policy: DownloadPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._best = 0
        self._paused_until = 0.0
        #: When a server first asked for a pause since the last new bytes; None: it has not.
        self._busy_since: float | None = None
        #: A server that has never answered is not retried here; the caller decides.
        self.has_answer = False

    async def after(self, reason: Exception, *, held_bytes: int) -> None:
        """Pause before the next attempt.

        A pause that a server asks for is kept and is no failure, as long as it ends within the longest time
        without data.

        Raises:
            DownloadError: no further attempt is allowed.
        """
        is_new = held_bytes > self._best
        if is_new:
            self._best, self._failures, self._busy_since = held_bytes, 0, None
        is_busy = isinstance(reason, Interrupted) and reason.is_busy
        if isinstance(reason, Interrupted) and is_busy and reason.pause_seconds is not None:
            pause = self._stated(reason, reason.pause_seconds)
        else:
            self._failures += not is_new
            if not (self.has_answer or is_busy) or self._failures >= self._policy.tries:
                raise DownloadError(str(reason)) from reason
            pause = self._policy.retry_seconds * 2**self._failures
        # Connections that broke at the same time share one pause.
        self._paused_until = max(self._paused_until, time.monotonic() + pause)
        await asyncio.sleep(self._paused_until - time.monotonic())

    def _stated(self, reason: Interrupted, seconds: float) -> float:
        now, most = time.monotonic(), self._policy.timeout_seconds
        if self._busy_since is None:
            self._busy_since = now
        pause = max(seconds, FRESH_SECONDS)  # a date may be over when it arrives
        if now + pause - self._busy_since > most:
            raise DownloadError(
                f"{reason} and asks for a pause of {seconds:g} s; downloads wait {most:g} s at most"
            ) from reason
        return pause
