"""Deadlines of one event loop that rarely expire; many of them share one timer of the loop.

Nearly every call ends before its deadline, and a separate timer would cost it more time and memory
than the rest of its wait. Here deadlines that expire at about the same time share a timer, which is
kept when they are cancelled, because the next calls use it too.

A deadline never expires early; it expires late by at most ``TICK_SECONDS`` or a thirtieth of its length.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from loguru import logger

__all__ = ["Deadlines", "TimeLimit", "TimeLimits"]

T = TypeVar("T")


#: Resolution of the shortest deadlines: calls share timers, and limits are seconds.
TICK_SECONDS: Final = 0.05
#: Significant bits of a length in ticks: longer deadlines are less exact, so that there are fewer timers.
_EXACT_BITS: Final = 6


class Deadlines(Generic[T]):
    """Entries with deadlines; use it on the thread of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[T], None]) -> None:
        """Set the loop, and the callback for entries whose deadline has passed."""
        #: The loop that runs the timers and callbacks.
        self.loop = loop
        self._on_due = on_due
        #: Timer and entries by tick of the loop's clock.
        self._rounds: dict[int, tuple[asyncio.TimerHandle, set[T]]] = {}

    def add(self, entry: T, seconds: float) -> int:
        """Set an entry's deadline; returns its tick, for ``discard``."""
        now = self.loop.time()
        inexact_bits = int(seconds / TICK_SECONDS).bit_length() - _EXACT_BITS if seconds > 0 else 0
        step = 1 << inexact_bits if inexact_bits > 0 else 1
        tick = math.ceil((now + seconds) / TICK_SECONDS / step) * step
        found = self._rounds.get(tick)
        if found is None:
            timer = self.loop.call_at(tick * TICK_SECONDS, self._ring, tick)
            found = self._rounds[tick] = (timer, set())
        found[1].add(entry)
        return tick

    def discard(self, entry: T, tick: int) -> None:
        """Cancel a deadline; does nothing when it has passed."""
        found = self._rounds.get(tick)
        if found is not None:
            found[1].discard(entry)

    def close(self) -> None:
        """Cancel every deadline."""
        for timer, _ in self._rounds.values():
            timer.cancel()
        self._rounds.clear()

    def _ring(self, tick: int) -> None:
        _, entries = self._rounds.pop(tick)
        for entry in entries:
            try:
                self._on_due(entry)
            except Exception:  # the other entries are due as well
                logger.exception("deadline_callback_failed")


class TimeLimits:
    """Creates time limits for waits of tasks on one event loop; create it on that loop."""

    def __init__(self) -> None:
        self._deadlines = Deadlines[TimeLimit](asyncio.get_running_loop(), lambda limit: limit.due())

    def of(self, seconds: float) -> TimeLimit:
        """``with limits.of(seconds):`` is a less exact ``async with asyncio.timeout(seconds):``."""
        return TimeLimit(self._deadlines, seconds)

    def close(self) -> None:
        """Cancel every limit; the limited blocks continue."""
        self._deadlines.close()


class TimeLimit:
    """Cancels the task that entered it when its time is over, and raises ``TimeoutError`` instead."""

    __slots__ = ("_cancelling", "_deadlines", "_seconds", "_task", "_tick", "is_over")

    def __init__(self, deadlines: Deadlines[TimeLimit], seconds: float) -> None:
        self._deadlines, self._seconds = deadlines, seconds
        #: Whether the time was over before the block ended.
        self.is_over = False

    def __enter__(self) -> TimeLimit:
        # The loop is passed because looking up the running one is a system call in Python 3.11.
        task: asyncio.Task[Any] | None = asyncio.current_task(self._deadlines.loop)
        assert task is not None  # noqa: S101 - used in coroutines
        self._task, self._cancelling = task, task.cancelling()
        self._tick = self._deadlines.add(self, self._seconds)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._deadlines.discard(self, self._tick)
        # A cancellation from elsewhere takes precedence.
        if self.is_over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from exc

    def due(self) -> None:
        """Cancel the task, because its time is over."""
        self.is_over = True
        self._task.cancel()
