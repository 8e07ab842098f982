"""When a failed LLM request is sent again, and how long to wait before."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = ["Fault", "RetryPolicy", "parse_retry_after"]

#: Statuses below 500 that say "not now": request timeout, conflict, too early, too many requests.
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
#: Statuses that no other model changes: the key or the account is refused.
_ACCOUNT: Final = frozenset({401, 402, 403})


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why one try gave no answer.

    ``status`` is None when no response came (connection refused or cut, time limit) or the
    response was no answer; such faults may pass by themselves.
    """

    what: str
    status: int | None = None
    retry_after_seconds: float | None = None

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status is None or self.status >= 500 or self.status in _TRANSIENT

    @property
    def is_of_the_model(self) -> bool:
        """Whether another model may succeed where this one was refused."""
        return not self.is_transient and self.status not in _ACCOUNT


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter, or what the endpoint asks for.

    Args:
        longest_seconds: an endpoint that asks for a longer pause is not waited for.
    """

    tries: int
    backoff_seconds: float
    longest_seconds: float

    def pause_seconds(self, fault: Fault, failed: int) -> float | None:
        """Return the pause before the next try, or None when there shall be none.

        Args:
            failed: tries that failed so far, >= 1.

        Source: "equal jitter": half of the exponential step is fixed, half is random, so that
        clients that failed together do not come back together.
        """
        if failed >= self.tries or not fault.is_transient:
            return None
        if fault.retry_after_seconds is not None:
            # Never earlier than asked; the jitter comes on top.
            pause = fault.retry_after_seconds + random.uniform(0, self.backoff_seconds)  # noqa: S311
            return pause if fault.retry_after_seconds <= self.longest_seconds else None
        step = min(self.backoff_seconds * 2.0 ** (failed - 1), self.longest_seconds)
        return step / 2 + random.uniform(0, step / 2)  # noqa: S311 - jitter, no secret


def parse_retry_after(value: str | None, *, now: datetime | None = None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for: a number or an HTTP date.

    Source: RFC 9110, section 10.2.3. Unreadable values count as none.
    """
    if not value:
        return None
    try:
        return max(0.0, float(value)) if float(value) < float("inf") else None
    except ValueError:
        pass
    try:
        moment: datetime = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds: float = (moment - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds)
