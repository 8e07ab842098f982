"""Comparison of benchmark results with the goals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, wait_until

from benchmarks import goals
from benchmarks.goals import GOALS, Verdict, as_text, measure, verdicts_of

SLOW_TO_STOP = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    Path("started").touch()
    time.sleep(600)
finally:
    time.sleep(1)
    Path("stopped").touch()
"""
RUN_PART = """
import sys
from pathlib import Path
from benchmarks import goals
goals.ROOT = Path(sys.argv[1])
goals.interrupted_by_sigterm()
goals._run("slow")
"""


def turn(seconds: float, *, rate: float, start: float = 1) -> dict[str, float]:
    return {
        "p50_seconds": seconds,
        "p99_seconds": 2 * seconds,
        "calls_per_second": rate,
        "start_seconds": start,
    }


def rpc_report(ours: list[float], taskiq: list[float]) -> dict[str, Any]:
    return {
        "contenders": {
            "nekro-sandbox": {"turns": [*(turn(one, rate=1000) for one in ours), None]},
            "taskiq": {"turns": [turn(one, rate=500, start=3) for one in [*taskiq, taskiq[0]]]},
        }
    }


def verdict(title: str, found: dict[str, list[dict[str, Any]]]) -> Verdict:
    (one,) = [verdict for verdict in verdicts_of(found) if verdict.goal.title.startswith(title)]
    return one


def test_figures_are_divided_by_those_of_the_peer_in_the_same_turn() -> None:
    found = {"one": [rpc_report([1.0, 4.0], [2.0, 8.0]), rpc_report([3.0], [2.0])]}
    p50 = verdict("sandbox, p50 / taskiq's", found)
    assert (p50.values, p50.runs, p50.figure) == ([0.5, 0.5, 1.5], 2, 0.5)
    assert verdict("the same, upper quartile", found).figure == 1.5
    rate = verdict("sandbox, calls/s / taskiq's, 100", found)
    assert rate.values == [2, 2, 2] and not rate.is_reached
    assert verdict("sandbox, p99", found).values == [2, 2, 2]
    # The processes of a run start once.
    assert verdict("worker's start", found).values == pytest.approx([1 / 4, 1 / 2])


def test_seconds_are_multiples_of_taskiqs_calls_of_their_run() -> None:
    waiting = {"seconds": [2.0, 4.0], "taskiq_seconds": [0.001, 0.003], "worker_peak_bytes": [10**8, None]}
    found = {"waiting": [waiting], "follow_up": [{"seconds": [0.01], "taskiq_seconds": [None, None]}]}
    assert verdict("10,000 calls", found).values == [1000, 2000]
    assert verdict("their worker", found).values == [100]
    assert verdict("AGENT result", found).values == []


def test_ratios_of_the_store_and_the_gateway_are_read_by_their_names() -> None:
    ratios = {"sqlite normal set, one by one": [1.2], "sqlite normal set, 50 at once": [0.9]}
    found = {"kv": [{"ratios": ratios}], "gateway": [{"ratios": {"post to event, time": [3.0, 2.5]}}]}
    assert verdict("store, SQLite normal, set, one by one", found).values == [1.2]
    assert verdict("store, SQLite normal, set, at once", found).values == [0.9]
    assert verdict("store, SQLite full, get, at once", found).values == []
    assert verdict("post to first event", found).figure == 2.75


def test_a_goal_is_decided_when_its_interval_lies_on_one_side_of_the_limit() -> None:
    limit = next(goal for goal in GOALS if goal.title == "their worker, MB").limit

    def decided(*offsets: float) -> tuple[bool, bool]:
        peaks = [(limit + offset) * 1e6 for offset in offsets]
        one = verdict(
            "their worker", {"waiting": [{"worker_peak_bytes": peaks, "seconds": [], "taskiq_seconds": []}]}
        )
        return one.is_decided, one.is_reached

    assert decided(-3, -2, -1) == (True, True)
    assert decided(3, 2, 1) == (True, False)
    assert decided(-3, -2, 1) == (False, True)
    assert decided(-3, -2) == (False, True)  # too few to say
    assert decided() == (False, False)


def test_parts_run_again_until_their_goals_are_decided() -> None:
    peaks = {"waiting": iter(([100e6], [400e6], [100e6], *([100e6] * 3 for _ in range(9))))}
    runs: list[str] = []
    failures: list[Exception] = []

    def run(part: str) -> dict[str, Any]:
        runs.append(part)
        return {"worker_peak_bytes": next(peaks[part]), "seconds": [1.0] * 3, "taskiq_seconds": [1.0]}

    verdicts = measure(run, ["waiting"], seconds=60, on_failure=failures.append)
    assert failures == []
    assert [one.is_decided and one.is_reached for one in verdicts] == [True, True]
    assert runs == ["waiting"] * verdicts[0].runs
    assert 3 < verdicts[0].runs < 9


def test_no_part_runs_again_when_the_time_is_over() -> None:
    report = {"worker_peak_bytes": [100e6], "seconds": [1.0], "taskiq_seconds": [1.0]}
    verdicts = measure(lambda part: report, ["waiting"], seconds=0, on_failure=list[Exception]().append)
    assert [(one.runs, one.is_decided, one.is_reached) for one in verdicts] == [(1, False, True)] * 2
    assert "reached, not certain" in as_text(verdicts)


def test_a_part_that_fails_keeps_no_verdict_of_another_one_back() -> None:
    failures: list[subprocess.CalledProcessError] = []

    def run(part: str) -> dict[str, Any]:
        if part == "gateway":
            raise subprocess.CalledProcessError(1, ["gateway"])
        return {"worker_peak_bytes": [100e6] * 9, "seconds": [1.0] * 9, "taskiq_seconds": [1.0]}

    verdicts = measure(run, ["gateway", "waiting"], seconds=60, on_failure=failures.append)
    assert [exc.cmd for exc in failures] == [["gateway"]]
    assert {one.goal.part: one.is_reached for one in verdicts} == {"gateway": False, "waiting": True}


def test_the_table_shows_figure_interval_limit_and_number_of_turns() -> None:
    found = {"waiting": [{"worker_peak_bytes": [200e6, 220e6, 240e6], "seconds": [], "taskiq_seconds": []}]}
    (line,) = [line for line in as_text(verdicts_of(found)).splitlines() if line.startswith("their worker")]
    assert line.split("MB  ")[1].split() == ["220", "(200–240)", "≤", "180", "missed", "3", "in", "1"]


def test_a_missed_goal_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"worker_peak_bytes": [100e6] * 3, "seconds": [1.0] * 3, "taskiq_seconds": [1.0]}
    monkeypatch.setattr(goals, "_run", lambda *words: report)
    assert goals.main(["--only", "waiting"]) == 0
    report["worker_peak_bytes"] = [400e6] * 3
    assert goals.main(["--only", "waiting"]) == 1
    assert "missed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        goals.parse(["--only", "nothing"])


def test_a_part_that_is_interrupted_stops_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "slow.py").write_text(SLOW_TO_STOP)
    command = [sys.executable, "-c", RUN_PART, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as goals:
        wait_until(lambda: (tmp_path / "started").exists(), what="the part to start")
        goals.terminate()
        goals.communicate(timeout=WAIT_SECONDS)
    assert goals.returncode != 0
    assert (tmp_path / "stopped").exists()
