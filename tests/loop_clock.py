"""Moves an event loop's clock forward, where a sleep would depend on the load of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any


class LoopClock:
    """Clock of the running loop; it continues normally and can jump."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead_seconds, real_time = 0.0, loop.time
        loop.time = lambda: real_time() + self._ahead_seconds  # type: ignore[method-assign]

    async def forward(self, seconds: float) -> None:
        """Jump, and run every timer that is due then."""
        self._ahead_seconds += seconds
        timers_have_run = asyncio.Event()
        asyncio.get_running_loop().call_later(0, timers_have_run.set)
        await timers_have_run.wait()


async def time_passes(clock: LoopClock, waiting: Collection[asyncio.Task[Any]]) -> None:
    """Jump past the time limits of tasks until all have ended."""
    while not all(task.done() for task in waiting):
        await clock.forward(1)
        await asyncio.wait(waiting, timeout=0.02)
