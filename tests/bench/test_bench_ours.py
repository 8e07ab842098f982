"""The project's own contenders, measured with a few calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.contender import NotAvailableError, Setup
from benchmarks.harness.processes import free_port
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.turn import Plan, take_turn
from benchmarks.harness.yardstick import describe_beside
from benchmarks.peers import contender_named

pytestmark = pytest.mark.extended

PLAN = Plan(sequential_calls=5, flood_calls=20, in_flight=5, workers=1, limit_seconds=60)


@pytest.mark.parametrize("name", ["nekro-bridge", "nekro-sandbox"])
def test_one_run_of_our_contender_gives_every_figure(tmp_path: Path, name: str) -> None:
    turn = tmp_path / "turn"
    turn.mkdir()
    with redis_server(tmp_path) as server:
        setup = Setup(
            redis_url=server.url, http_port=free_port(), directory=str(turn), workers=1, in_flight=5
        )
        try:
            figures = take_turn(contender_named(name), setup, PLAN)
        except NotAvailableError as exc:
            pytest.skip(f"no sandbox on this machine: {exc}")
    assert 0 < figures.p50_seconds <= figures.p95_seconds <= figures.p99_seconds
    assert figures.calls_per_second > 0
    assert figures.worker_peak_bytes


def test_a_figure_relative_to_the_reference_is_a_multiple_of_it() -> None:
    assert describe_beside(0.03, 0.002, 0.004).startswith("10.0 of taskiq's calls (2.00 ms before, 4.00 ms")
    assert "make bench" in describe_beside(0.03, None, 0.004)
