"""Busy polling: an event loop that looks for what it waits for without sleeping in between.

A processor that slept takes its time to wake, inside a virtual machine most of all, and a call's road
wakes one process after the other. A loop that waits for one call may stay awake instead, and for the
next one, for a time from when it was sent. It goes to sleep all the same where that would cost more than
it brings: while several calls are under way, so that there is other work; after a call that took longer
than the loop would have stayed awake, until one is answered in time again; and always, where the process
has no more than one processor, which those need that it waits for. With two processors one call in a
hundred still waits for the kernel to move it to the other one, so nobody polls unless the settings say so.

Sources of the ideas: HAProxy's ``busy-polling``; the growing and shrinking of KVM's halt polling.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

__all__ = ["BusyPoll", "processors"]

#: Share of the processors that a container has: microseconds of a period (or ``max``) and the period.
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


class BusyPoll:
    """Keeps the running loop awake after one call was sent; made on that loop."""

    def __init__(self, seconds: float) -> None:
        """Take for how long after a call was sent; 0: never."""
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds if seconds and processors() > 1 else 0
        self._until = float("-inf")
        self._turns = False
        self._pays = True

    def began(self, *, under_way: int) -> None:
        """A call was sent, and so many are under way with it."""
        if under_way != 1 or not self._pays or not self._seconds:
            self.stop()
            return
        self._until = time.monotonic() + self._seconds
        if not self._turns:
            self._turns = True
            self._loop.call_soon(self._turn)

    def ended(self, *, after_seconds: float) -> None:
        """A call was answered, or its caller waits no longer."""
        self._pays = after_seconds <= self._seconds

    def stop(self) -> None:
        """Sleep again as soon as there is nothing to do."""
        self._until = float("-inf")

    def _turn(self) -> None:
        self._turns = time.monotonic() < self._until
        if self._turns:
            self._loop.call_soon(self._turn)


def processors(cpu_max: Path = _CPU_MAX) -> float:
    """How many processors this process may use at a time: those it may run on, or its container's share.

    Shares are known of control groups of version 2.
    """
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, period = cpu_max.read_text().split()
        return min(able, float(microseconds) / float(period))
    except (OSError, ValueError):  # there is no such file, or no limit
        return able
