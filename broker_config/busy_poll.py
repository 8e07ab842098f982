"""Busy polling: keeps an event loop awake for a short time after it has sent a call.

An idle processor takes time to wake up, especially in a virtual machine, and a call wakes several
processes in turn. With busy polling the loop of a caller polls instead of sleeping for a limited time
after sending a call. It does not poll where that would cost more than it saves: while several calls are
in flight, so that there is other work; after a call that took longer than the polling time, until one is
answered within it again; and never if the process has only one processor, which the other processes need.
With two processors, one call in a hundred still waits until the kernel migrates it to the other one, so
polling is off by default.

Sources of the ideas: HAProxy's ``busy-polling``; the growing and shrinking of KVM's halt polling.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

__all__ = ["BusyPoll", "processors"]

#: CPU quota of a container (cgroup v2): quota in microseconds (or ``max``) and period.
_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


class BusyPoll:
    """Keeps the running loop awake after a call was sent; create it on that loop."""

    def __init__(self, seconds: float) -> None:
        """Set the polling time after a call; 0 disables polling."""
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds if seconds and processors() > 1 else 0
        self._until = float("-inf")
        self._turns = False
        self._pays = True

    def began(self, *, under_way: int) -> None:
        """Record that a call was sent; ``under_way`` counts it and all other calls in flight."""
        if under_way != 1 or not self._pays or not self._seconds:
            self.stop()
            return
        self._until = time.monotonic() + self._seconds
        if not self._turns:
            self._turns = True
            self._loop.call_soon(self._turn)

    def ended(self, *, after_seconds: float) -> None:
        """Record that a call was answered, or that its caller no longer waits."""
        self._pays = after_seconds <= self._seconds

    def stop(self) -> None:
        """Stop polling; the loop sleeps again when it is idle."""
        self._until = float("-inf")

    def _turn(self) -> None:
        self._turns = time.monotonic() < self._until
        if self._turns:
            self._loop.call_soon(self._turn)


def processors(cpu_max: Path = _CPU_MAX) -> float:
    """Return how many processors this process may use: its CPU affinity, or its container's quota if lower.

    Only quotas of cgroup v2 are read.
    """
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        microseconds, period = cpu_max.read_text().split()
        return min(able, float(microseconds) / float(period))
    except (OSError, ValueError):  # the file does not exist, or there is no quota
        return able
