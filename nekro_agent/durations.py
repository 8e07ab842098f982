"""Times that several packages share: pauses, intervals and limits, each with the reason for its value."""

from __future__ import annotations

from typing import Final

__all__ = ["STALE_SECONDS"]

#: How long an unfinished file of a process that ended is kept: a repeated download resumes it.
STALE_SECONDS: Final = 3 * 24 * 3600
