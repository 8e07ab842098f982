"""Times that several packages share: pauses, intervals and limits, each with the reason for its value.

A time that one module alone needs is defined there. A time that follows from a setting or from another
time is an expression where it is used.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

__all__ = [
    "CLOSE_STEP_SECONDS",
    "DEFER_SECONDS",
    "FRESH_SECONDS",
    "GRACE_SECONDS",
    "HOOK_SECONDS",
    "POLL_SECONDS",
    "PROGRAM_SECONDS",
    "PROGRESS_SECONDS",
    "PUBLISH_SECONDS",
    "REFRESH_SECONDS",
    "RETRY_SECONDS",
    "STALE_SECONDS",
    "stated_pause",
]

#: Pause before a server that refused or did not answer is asked again. A fleet that waits for a restarted
#: server asks it twice per second and worker; a caller loses half a second of its time limit.
RETRY_SECONDS: Final = 0.5
#: Interval at which one waiter checks a condition that no event announces: a file lock, a row, a process.
#: The delay is not noticeable, and a check costs less than a hundredth of it.
POLL_SECONDS: Final = 0.05
#: Interval at which a process writes, and others read, state that is followed while it changes: progress,
#: signals, requests to stop. People see no delay, and each costs one statement.
REFRESH_SECONDS: Final = 0.3
#: How long an observation of another process or of a server is used before it is made again.
FRESH_SECONDS: Final = 1.0
#: Interval at which a process that starts reports what it does, and people are told what is waited for.
PROGRESS_SECONDS: Final = 10.0
#: Delay of work that no caller waits for, so that it does not take the interpreter from work that one does,
#: and of the rest of a flood, so that others get the event loop.
DEFER_SECONDS: Final = 0.02
#: Time limit of one step of closing. Each step takes milliseconds unless something hangs; the limits of a
#: worker's shutdown (``WorkerSettings.stop_seconds``) are multiples.
CLOSE_STEP_SECONDS: Final = 4.0
#: How long after a call's time limit its end may take: the hard limit is one grace later, the claim of a call
#: lasts three, the lease of its delivery is renewed for six, so that each outlives what it protects.
GRACE_SECONDS: Final = 5.0
#: How long plugins may delay a prompt or a message with one kind of hook; a hook in another process has half
#: of it, so that its failure is seen here.
HOOK_SECONDS: Final = 10.0
#: Time limit of recording a call and of publishing it, each including reconnections: a restart of a server
#: takes seconds, and the caller's time limit runs meanwhile.
PUBLISH_SECONDS: Final = 6
#: How long a program or service of the host may take to start or to answer: an interpreter, bubblewrap, a
#: container engine, redis-server, a package index. Far above what a loaded host needs; then it is an error.
PROGRAM_SECONDS: Final = 30.0
#: How long an unfinished file of a process that ended is kept: a repeated download resumes it.
STALE_SECONDS: Final = 3 * 24 * 3600

_NUMBER: Final = re.compile(r"([0-9]{1,9})[0-9]*(\.[0-9]+)?")


def stated_pause(header: str | None, *, now: str | None = None) -> float | None:
    """Return the seconds of a ``Retry-After`` header: a number, or a date; None if it states none.

    Source: RFC 9110, section 10.2.3; endpoints of models also state fractions.

    Args:
        now: header ``Date`` of the answer, so that a wrong clock does not matter; None: this host's time.
    """
    text = (header or "").strip()
    if number := _NUMBER.fullmatch(text):
        return float(number[1] + (number[2] or ""))
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
