"""Measure the present speed of the machine: the time of one call through taskiq, a known task queue.

Milliseconds of two machines, or of one machine at different times, cannot be compared. Multiples of that
call can.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from benchmarks.harness.contender import Setup
from benchmarks.harness.processes import free_port
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.turn import Plan, take_turn
from benchmarks.peers import contender_named

__all__ = ["describe_beside", "taskiq_seconds"]

_PEER: Final = "taskiq"
_PLAN: Final = Plan(sequential_calls=500, flood_calls=100, in_flight=10, workers=1, limit_seconds=60)


def taskiq_seconds() -> float | None:
    """Return the median of 500 sequential calls of taskiq; None where it is not installed.

    Uses a Redis, a worker and a client of its own, which are stopped afterwards.

    Raises:
        TurnFailedError: one of them failed.
    """
    contender = contender_named(_PEER)
    if contender.missing() is not None:
        return None
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        turn = Path(name) / "turn"
        turn.mkdir()
        setup = Setup(
            redis_url=server.url,
            http_port=free_port(),
            directory=str(turn),
            workers=_PLAN.workers,
            in_flight=_PLAN.in_flight,
        )
        return take_turn(contender, setup, _PLAN).p50_seconds


def describe_beside(seconds: float, before: float | None, after: float | None) -> str:
    """Return a figure in multiples of taskiq's call, measured before and after the figure, as text."""
    if before is None or after is None:
        return "taskiq is not installed (make bench installs it), so there is nothing to compare with"
    times = 2 * seconds / (before + after)
    return f"{times:,.1f} of taskiq's calls ({before * 1e3:.2f} ms before, {after * 1e3:.2f} ms after)"
