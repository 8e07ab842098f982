"""Estimate the rate and the remaining time of a job from the percents that it reports."""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["Pace", "rate_words", "time_words"]

#: Only the newest steps count: the rate of an hour ago does not predict the present one.
_RECENT_STEPS: Final = 10
#: Percents are whole numbers: a rate from a smaller difference would be a guess.
_FEWEST_PERCENTS: Final = 2
_MINUTE, _HOUR = 60, 3600


class Pace:
    """The rate of one job; call ``see`` whenever its row was read."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)

    def see(self, percent: int, *, now: float) -> None:
        """Record the percent of a row.

        Args:
            now: seconds of a monotonic clock.
        """
        if self._steps and percent < self._steps[-1][1]:
            self._steps.clear()  # the job was restarted
        if not self._steps or percent > self._steps[-1][1]:
            self._steps.append((now, percent))

    def per_second(self) -> float | None:
        """Percents per second; None while too little is known."""
        if not self._steps:
            return None
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        if last - first < _FEWEST_PERCENTS or ended <= began:
            return None
        return (last - first) / (ended - began)

    def seconds_left(self, *, now: float) -> float | None:
        """Seconds until 100 percent at this pace; None while it is not known."""
        rate = self.per_second()
        if not rate:
            return None
        seen_at, percent = self._steps[-1]
        return max((100 - percent) / rate - (now - seen_at), 0.0)


def rate_words(per_second: float | None) -> str:
    """Format a rate in the smallest unit of s, min and h in which it is at least 1, else per hour."""
    if not per_second:
        return ""
    if per_second >= 1:
        return f"{per_second:.1f} %/s"
    if per_second * _MINUTE >= 1:
        return f"{per_second * _MINUTE:.1f} %/min"
    return f"{per_second * _HOUR:.1f} %/h"


def time_words(seconds: float | None) -> str:
    """Format a remaining time: ``42s``, ``3:05``, ``2:00:00``; ``-:--`` while it is not known."""
    if seconds is None:
        return "-:--"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    hours, rest = divmod(whole, _HOUR)
    return (
        f"{hours}:{rest // _MINUTE:02}:{rest % _MINUTE:02}"
        if hours
        else f"{rest // _MINUTE}:{rest % _MINUTE:02}"
    )
