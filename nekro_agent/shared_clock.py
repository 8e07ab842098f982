"""The time that all processes of a system share: that of the database, not those of the hosts.

Times that one process writes and another one compares (deadlines of calls, the age of signed commands, due
times) are times of this clock. A process compares itself with the database when it starts and periodically
(``nekro.app.clock_watch``); in between it adds the time elapsed locally, so reading the clock needs no
I/O and is not affected by a step of the host's clock. A process without a comparison, and every process on
SQLite, whose database is on the same host, uses the host's clock.

Durations inside one process do not use it; they are measured with ``time.monotonic``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

__all__ = [
    "Reading",
    "SharedClock",
    "elapsed_seconds",
    "read_clock",
    "share_time",
    "shared_now",
    "shared_time",
]

#: Exchanges of one reading; the one with the shortest round trip is used.
_EXCHANGES: Final = 3

#: Seconds since a fixed moment; unlike ``time.monotonic`` it also counts while the host is suspended.
elapsed_seconds: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The time of another clock, and this process' clocks at that moment."""

    #: Seconds since 1970 by the other clock.
    theirs_seconds: float
    #: Seconds since 1970 by the clock of this host.
    host_seconds: float
    #: ``elapsed_seconds`` at that moment.
    elapsed_seconds: float
    #: Half the duration of the exchange, which is the largest possible error of the reading.
    uncertain_seconds: float

    @property
    def ahead_seconds(self) -> float:
        """How far the host's clock is ahead of the other one; negative: behind."""
        return self.host_seconds - self.theirs_seconds


async def read_clock(
    ask: Callable[[], Awaitable[float]], *, host_clock: Callable[[], float] = time.time
) -> Reading:
    """Read another clock, assuming that it was read in the middle of the exchange.

    Args:
        ask: returns the other clock's seconds since 1970; its errors propagate.

    Source: F. Cristian, Probabilistic clock synchronization (1989).
    """
    readings = [await _read_once(ask, host_clock) for _ in range(_EXCHANGES)]
    return min(readings, key=lambda reading: reading.uncertain_seconds)


async def _read_once(ask: Callable[[], Awaitable[float]], host_clock: Callable[[], float]) -> Reading:
    began = elapsed_seconds()
    theirs = await ask()
    half = (elapsed_seconds() - began) / 2
    return Reading(
        theirs_seconds=theirs,
        host_seconds=host_clock() - half,
        elapsed_seconds=began + half,
        uncertain_seconds=half,
    )


class SharedClock:
    """This process's view of the shared time; thread-safe."""

    def __init__(self) -> None:
        #: The shared time when ``elapsed_seconds`` was zero; None before the first comparison.
        self._base_seconds: float | None = None

    def now(self) -> float:
        """Return the seconds since 1970."""
        base = self._base_seconds
        return time.time() if base is None else base + elapsed_seconds()

    def take(self, reading: Reading) -> None:
        """Follow a reading of the database's clock if the difference exceeds the reading's uncertainty.

        Within the uncertainty nothing changes; for a first reading this means that the host's clock is used.
        """
        held = self._base_seconds
        if held is None:
            held = reading.host_seconds - reading.elapsed_seconds
        theirs = reading.theirs_seconds - reading.elapsed_seconds
        self._base_seconds = held if abs(theirs - held) <= reading.uncertain_seconds else theirs


_clock: Final = SharedClock()


def shared_now() -> float:
    """Return the shared time in seconds since 1970."""
    return _clock.now()


def shared_time() -> datetime:
    """Return the shared time, in UTC."""
    return datetime.fromtimestamp(_clock.now(), UTC)


def share_time(reading: Reading) -> None:
    """Let this process follow a reading of the database's clock, see ``SharedClock.take``."""
    _clock.take(reading)
