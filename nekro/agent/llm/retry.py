"""Decides when a failed LLM request is retried, and after which pause."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from nekro_agent.errors import LLMAccessError, LLMContextError, LLMError, LLMFilterError, LLMUnavailableError

__all__ = ["BACKOFF_SECONDS", "NOT_CONNECTED", "Fault", "RetryPolicy", "TryFailed", "parse_retry_after"]

#: Pause before the second attempt: endpoints recover from an overload in seconds.
BACKOFF_SECONDS: Final = 1.0

#: Begins the description of a fault of the connection.
NOT_CONNECTED: Final = "connection failed"
#: Statuses below 500 that are temporary: request timeout, conflict, too early, too many requests.
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
#: Faults that the same request meets again, whatever the status.
_PERMANENT: Final = (LLMAccessError, LLMContextError, LLMFilterError)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why one attempt gave no answer.

    ``status`` is None when no response came (connection refused or cut, time limit) or the
    response was not an answer; such faults may be temporary. ``error`` is what the request fails with
    if no attempt succeeds.
    """

    what: str
    error: type[LLMError] = LLMUnavailableError
    status: int | None = None
    retry_after_seconds: float | None = None

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        if issubclass(self.error, _PERMANENT):
            return False
        return self.status is None or self.status >= 500 or self.status in _TRANSIENT

    @property
    def is_refusal(self) -> bool:
        """Whether the endpoint did no work for the request: it was refused, or did not arrive."""
        if self.status is not None and self.status != 200:
            return True
        return self.what.startswith(NOT_CONNECTED) and self.error is LLMUnavailableError


class TryFailed(Exception):
    """Ends one attempt; caught by the retry loop of a client and never leaves it."""

    def __init__(self, fault: Fault) -> None:
        """Keep why there is no answer."""
        super().__init__(fault.what)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter, or the pause that the endpoint requests.

    Args:
        longest_seconds: if an endpoint requests a longer pause, the request fails.
    """

    tries: int
    backoff_seconds: float
    longest_seconds: float

    def pause_seconds(self, fault: Fault, failed: int) -> float | None:
        """Return the pause before the next attempt, or None if there is none.

        Args:
            failed: attempts that failed so far, >= 1.

        Source: "equal jitter": half of the exponential step is fixed, half is random, so that
        clients that failed together do not retry together.
        """
        if failed >= self.tries or not fault.is_transient:
            return None
        if fault.retry_after_seconds is not None:
            # Never earlier than requested; the jitter is added.
            pause = fault.retry_after_seconds + random.uniform(0, self.backoff_seconds)  # noqa: S311
            return pause if fault.retry_after_seconds <= self.longest_seconds else None
        step = min(self.backoff_seconds * 2.0 ** (failed - 1), self.longest_seconds)
        return step / 2 + random.uniform(0, step / 2)  # noqa: S311 - jitter, not a secret


def parse_retry_after(value: str | None, *, now: datetime | None = None) -> float | None:
    """Return the seconds that a ``Retry-After`` header requests: a number or an HTTP date.

    Source: RFC 9110, section 10.2.3. Invalid values are ignored.
    """
    if not value:
        return None
    try:
        return max(0.0, float(value)) if float(value) < float("inf") else None
    except ValueError:
        pass
    try:
        moment: datetime = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds: float = (moment - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds)
