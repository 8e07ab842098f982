"""Measure the costs of a call and compare them with their goals: ``python -m benchmarks.goals``.

Goals in milliseconds were set on a machine where one call through taskiq took 0.64 ms. They are converted to
multiples of taskiq's call, and our figures are divided by the time of that call in the same run. Each part of
the run is a benchmark of its own and prints its report to stderr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.harness.contender import ROOT
from benchmarks.harness.figures import Spread, percentile, spread
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.report import table

__all__ = ["Goal", "as_text", "goals_of", "main", "parse"]

#: Time of one call through taskiq on the machine where the goals were set.
_TASKIQ_SECONDS: Final = 0.64e-3
_OURS, _PEER = "nekro-sandbox", "taskiq"
_MEGABYTE: Final = 1e6


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal: a measured ratio and its limit."""

    title: str
    #: None when it could not be measured.
    ratio: Spread | None
    limit: float
    at_least: bool = False
    #: The figure in its own unit; empty where there is only the ratio.
    figure: str = ""

    @property
    def is_reached(self) -> bool:
        """Whether the median is within the limit."""
        if self.ratio is None:
            return False
        return self.ratio.median >= self.limit if self.at_least else self.ratio.median <= self.limit


def goals_of(found: dict[str, Any]) -> list[Goal]:
    """Return the goals with the results of the benchmarks.

    Args:
        found: results by benchmark: ``one`` and ``two`` (``benchmarks.rpc`` with that many workers),
            ``alternate``, ``waiting``, ``follow_up``, ``kv``, ``kept``.
    """
    ours = [turn for turn in found["one"]["contenders"][_OURS]["repetitions"] if turn]
    peers = [turn for turn in found["one"]["contenders"][_PEER]["repetitions"] if turn]
    waiting, follow_up = found["waiting"], found["follow_up"]
    return [
        Goal(title="sandbox, p50 / taskiq's", ratio=spread(found["alternate"][_OURS]), limit=1),
        Goal(
            title="sandbox, p99 / its p50",
            ratio=spread(turn["p99_seconds"] / turn["p50_seconds"] for turn in ours),
            limit=3,
        ),
        Goal(
            title="sandbox, calls/s / taskiq's, 100 in flight",
            ratio=_ratio(found["one"], "calls_per_second"),
            limit=1,
            at_least=True,
        ),
        Goal(
            title="sandbox, calls/s / taskiq's, two workers each",
            ratio=_ratio(found["two"], "calls_per_second"),
            limit=1.5,
            at_least=True,
        ),
        _in_calls(
            "10,000 calls that wait 1 s", waiting["seconds"], waiting["taskiq_seconds"], goal_seconds=4
        ),
        Goal(
            title="their worker, MB",
            ratio=spread(size / _MEGABYTE for size in [waiting["worker_peak_bytes"]] if size is not None),
            limit=250,
        ),
        _in_calls(
            "AGENT result to next request, p50",
            [percentile(follow_up["seconds"], 50)],
            follow_up["taskiq_seconds"],
            goal_seconds=5e-3,
        ),
        *(
            Goal(title=f"store, {name} / bare driver", ratio=spread(ratios), limit=1.3)
            for name, ratios in found["kv"]["ratios"].items()
        ),
        _in_calls(
            "worker's start to its first answer",
            [turn["start_seconds"] for turn in ours],
            [turn["p50_seconds"] for turn in peers],
            goal_seconds=1.5,
        ),
    ]


def _ratio(report: dict[str, Any], field: str) -> Spread | None:
    found = report["ratios"].get(_OURS, {}).get(_PEER, {}).get(field)
    return None if found is None else Spread(**found)


def _in_calls(
    title: str, seconds: Sequence[float], taskiq_seconds: Iterable[float | None], *, goal_seconds: float
) -> Goal:
    """Convert a goal in seconds to one in multiples of taskiq's call.

    Args:
        taskiq_seconds: times of that call; None where taskiq is not installed.
    """
    calls = [call for call in taskiq_seconds if call is not None]
    taken = spread(seconds)
    one = mean(calls) if calls else None
    return Goal(
        title=f"{title}, in taskiq's calls",
        ratio=None if one is None else spread(value / one for value in seconds),
        limit=goal_seconds / _TASKIQ_SECONDS,
        figure="" if taken is None else f"{taken.median:.4g} s",
    )


def as_text(goals: Iterable[Goal]) -> str:
    """Render the table: ratios with their spread, and whether each goal is reached."""
    rows = [
        [
            goal.title,
            "-" if goal.ratio is None else "{:.4g} ({:.4g}–{:.4g})".format(*astuple(goal.ratio)),
            f"{'≥' if goal.at_least else '≤'} {goal.limit:.4g}",
            "reached" if goal.is_reached else "not reached",
            goal.figure,
        ]
        for goal in goals
    ]
    return "\n".join(table(["goal", "median (least–greatest)", "limit", "", "here"], rows))


def _run(module: str, *words: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name:
        path = Path(name) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", *words, "--json", str(path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as part:
            try:
                code = part.wait()
            except BaseException:
                part.terminate()  # it stops its workers; `subprocess.run` would kill it, and they would stay
                raise
        if code:
            raise subprocess.CalledProcessError(code, command)
        figures: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return figures


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goals", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each contender (default: 3)")
    parser.add_argument("--quick", action="store_true", help="short runs, to check that all of it works")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a benchmark failed."""
    interrupted_by_sigterm()
    options = parse(argv)
    contenders = ("--only", f"{_PEER},{_OURS}")
    turns = ("--quick",) if options.quick else ("--repetitions", str(options.repetitions))
    try:
        found = {
            "one": _run("rpc", *contenders, *turns),
            "two": _run("rpc", *contenders, *turns, "--workers", "2"),
            "alternate": _run(
                "alternate",
                *("--only", f"{_PEER},{_OURS}"),
                *(("--rounds", "2", "--calls", "50") if options.quick else ()),
            )["p50_ratios"],
            "waiting": _run("waiting_calls", *(("--repetitions", "1") if options.quick else ())),
            "follow_up": _run("follow_up", "--turns", "2" if options.quick else "15"),
            "kv": _run("kv_costs", *(("--repetitions", "2", "--count", "50") if options.quick else ())),
        }
    except subprocess.CalledProcessError as exc:
        print(f"{' '.join(map(str, exc.cmd))} failed with exit code {exc.returncode}", file=sys.stderr)
        return 1
    print(as_text(goals_of(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
