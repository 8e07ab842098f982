"""Busy polling: an event loop that looks for what it waits for without sleeping in between.

A processor that slept takes its time to wake, inside a virtual machine most of all, and a call's road
wakes one process after the other. Source of the idea: HAProxy's ``busy-polling``.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["BusyPoll"]


class BusyPoll:
    """Keeps the running loop awake for a while, again and again; made on that loop."""

    def __init__(self, seconds: float) -> None:
        """Take how long; 0 does nothing."""
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._until = float("-inf")
        self._turns = False

    def stay_awake(self) -> None:
        """Do not sleep for that long from now on."""
        if not self._seconds:
            return
        self._until = time.monotonic() + self._seconds
        if not self._turns:
            self._turns = True
            self._loop.call_soon(self._turn)

    def end(self) -> None:
        """Sleep again as soon as there is nothing to do."""
        self._until = float("-inf")

    def _turn(self) -> None:
        self._turns = time.monotonic() < self._until
        if self._turns:
            self._loop.call_soon(self._turn)
