"""An event loop's clock that a test puts forward, where a sleep would depend on how busy the machine is."""

from __future__ import annotations

import asyncio


class LoopClock:
    """Time of the running loop, which goes on as always and jumps at will."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._ahead_seconds, real_time = 0.0, loop.time
        loop.time = lambda: real_time() + self._ahead_seconds  # type: ignore[method-assign]

    async def forward(self, seconds: float) -> None:
        """Jump, and let every timer run that is due then."""
        self._ahead_seconds += seconds
        timers_have_run = asyncio.Event()
        asyncio.get_running_loop().call_later(0, timers_have_run.set)
        await timers_have_run.wait()
