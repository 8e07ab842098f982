"""Comparison of benchmark results with the goals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, wait_until

from benchmarks.goals import as_text, goals_of

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


def rpc_report(*, calls: float) -> dict[str, Any]:
    def turns(*seconds: float) -> dict[str, Any]:
        return {
            "repetitions": [
                {"p50_seconds": one, "p99_seconds": 2.5 * one, "start_seconds": 1000 * one} for one in seconds
            ]
            + [None]
        }

    return {
        "contenders": {"nekro-sandbox": turns(0.002, 0.004), "taskiq": turns(0.002, 0.002)},
        "ratios": {
            "nekro-sandbox": {
                "taskiq": {
                    "calls_per_second": {"median": calls, "low": calls, "high": calls},
                }
            }
        },
    }


def figures() -> dict[str, Any]:
    return {
        "one": rpc_report(calls=1.6),
        "two": rpc_report(calls=1.4),
        "alternate": {"nekro-sandbox": [0.8, 0.9, 1.2]},
        "waiting": {
            "seconds": [11.0, 12.0, 13.0],
            "worker_peak_bytes": 249_000_000,
            "taskiq_seconds": [0.001, 0.003],
        },
        "follow_up": {"seconds": [0.01, 0.02, 0.03], "taskiq_seconds": [0.002, 0.002]},
        "kv": {"ratios": {"sqlite normal get, one by one": [1.2, 1.4]}},
    }


def test_goals_in_seconds_are_multiples_of_taskiqs_calls() -> None:
    goals = {goal.title: goal for goal in goals_of(figures())}
    reached = {title: goal.is_reached for title, goal in goals.items()}
    assert reached == {
        "sandbox, p50 / taskiq's": True,
        "sandbox, p99 / its p50": True,
        "sandbox, calls/s / taskiq's, 100 in flight": True,
        "sandbox, calls/s / taskiq's, two workers each": False,
        "10,000 calls that wait 1 s, in taskiq's calls": True,
        "their worker, MB": True,
        "AGENT result to next request, p50, in taskiq's calls": False,
        "store, sqlite normal get, one by one / bare driver": True,
        "worker's start to its first answer, in taskiq's calls": True,
    }
    waiting = goals["10,000 calls that wait 1 s, in taskiq's calls"]
    assert waiting.limit == pytest.approx(6250)
    assert waiting.ratio is not None and waiting.ratio.median == pytest.approx(6000)
    follow_up = goals["AGENT result to next request, p50, in taskiq's calls"]
    assert follow_up.limit == pytest.approx(7.8125)
    assert follow_up.ratio is not None and follow_up.ratio.median == pytest.approx(10)
    start = goals["worker's start to its first answer, in taskiq's calls"]
    assert start.ratio is not None and start.ratio.median == pytest.approx(1500)


def test_an_unmeasured_goal_is_not_reached() -> None:
    found = figures()
    found["two"]["ratios"] = {}
    found["waiting"]["worker_peak_bytes"] = None
    found["follow_up"]["taskiq_seconds"] = [None, None]
    unreached = [goal.title for goal in goals_of(found) if not goal.is_reached]
    assert unreached == [
        "sandbox, calls/s / taskiq's, two workers each",
        "their worker, MB",
        "AGENT result to next request, p50, in taskiq's calls",
    ]
    (line,) = [line for line in as_text(goals_of(found)).splitlines() if "two workers" in line]
    assert line.split("workers each")[1].split() == ["-", "≥", "1.5", "not", "reached"]


def test_the_table_shows_ratio_limit_and_figure() -> None:
    (line,) = [line for line in as_text(goals_of(figures())).splitlines() if line.startswith("10,000")]
    assert line.split("calls  ")[1].split() == ["6000", "(5500–6500)", "≤", "6250", "reached", "12", "s"]


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
