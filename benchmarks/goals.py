"""Measure the costs of a call and compare them with their goals: ``python -m benchmarks.goals``.

Each part of the run is a benchmark of its own, which measures in turns and prints its report to stderr. A
part is run again until its goals are decided: until the interval that contains the figure with 95 %
confidence lies on one side of the limit. When the time is over, the figure alone decides. Times are multiples
of taskiq's call in the same run, so that they are comparable between machines.

exit codes: 0 every goal is reached, 1 one is missed or a benchmark failed, 2 usage
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from benchmarks.harness.contender import ROOT
from benchmarks.harness.figures import interval, quantile
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.report import table

__all__ = ["GOALS", "Goal", "Verdict", "as_text", "main", "measure", "parse", "verdicts_of"]

_OURS: Final = "nekro-sandbox"
_MEGABYTE: Final = 1e6
#: Reports of one part, one for each time that it ran.
Reports = list[dict[str, Any]]
_PARTS: Final[dict[str, tuple[str, ...]]] = {
    "one": ("rpc", "--only", f"raw-redis,taskiq,{_OURS}", "--turns", "6"),
    # Apart, as its idle processes use a share of a core.
    "ray": ("rpc", "--only", f"ray,{_OURS}", "--turns", "6"),
    "two": ("rpc", "--only", f"taskiq,{_OURS}", "--turns", "6", "--workers", "2"),
    "waiting": ("waiting_calls", "--repetitions", "3"),
    "follow_up": ("follow_up", "--turns", "8"),
    "kv": ("kv_costs", "--repetitions", "9"),
    "gateway": ("gateway", "--repetitions", "4"),
}
#: Further options of a short run, to see that all of it works.
_QUICK: Final[dict[str, tuple[str, ...]]] = {
    "one": ("--quick", "--turns", "2"),
    "two": ("--quick", "--turns", "2"),
    "ray": ("--quick", "--turns", "2"),
    "waiting": ("--calls", "200", "--repetitions", "1"),
    "follow_up": ("--turns", "2"),
    "kv": ("--repetitions", "3", "--count", "50", "--at-once", "50"),
    "gateway": ("--requests", "100", "--posts", "20", "--repetitions", "2"),
}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A limit of a figure that one part of the run measures."""

    title: str
    part: str
    #: Reads the values of each turn from a report of the part; empty when they could not be measured.
    values: Callable[[dict[str, Any]], Iterable[float]]
    limit: float
    at_least: bool = False
    #: The quantile of the values that is limited.
    share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the turns so far say about a goal."""

    goal: Goal
    values: list[float]
    #: How often the part ran.
    runs: int

    @property
    def figure(self) -> float | None:
        """The quantile that the goal limits; None when nothing was measured."""
        return quantile(self.values, self.goal.share) if self.values else None

    @property
    def is_reached(self) -> bool:
        """Whether the figure is within the limit; a figure that was not measured is not."""
        return self.figure is not None and self._is_within(self.figure)

    @property
    def is_decided(self) -> bool:
        """Whether more turns would hardly change it: the whole interval lies on one side of the limit."""
        ends = interval(self.values, self.goal.share)
        return ends is not None and len({self._is_within(end) for end in ends}) == 1

    def cells(self) -> list[str]:
        """Return its row of the table."""
        figure, ends = self.figure, interval(self.values, self.goal.share)
        spread = "" if ends is None else f" ({ends[0]:.4g}–{ends[1]:.4g})"
        return [
            self.goal.title,
            "-" if figure is None else f"{figure:.4g}{spread}",
            f"{'≥' if self.goal.at_least else '≤'} {self.goal.limit:.4g}",
            ("reached" if self.is_reached else "missed") + ("" if self.is_decided else ", not certain"),
            f"{len(self.values)} in {self.runs}",
        ]

    def _is_within(self, figure: float) -> bool:
        return figure >= self.goal.limit if self.goal.at_least else figure <= self.goal.limit


def _turns(report: dict[str, Any], name: str) -> list[dict[str, Any] | None]:
    found: list[dict[str, Any] | None] = report["contenders"].get(name, {}).get("turns", [])
    return found


def _ratios(field: str, peer: str) -> Callable[[dict[str, Any]], Iterable[float]]:
    """Divide our figure by a peer's in the same turn."""

    def values(report: dict[str, Any]) -> Iterable[float]:
        for own, other in zip(_turns(report, _OURS), _turns(report, peer), strict=False):
            if own is not None and other is not None:
                yield own[field] / other[field]

    return values


def _tails(report: dict[str, Any]) -> Iterable[float]:
    return [turn["p99_seconds"] / turn["p50_seconds"] for turn in _turns(report, _OURS) if turn]


def _start(report: dict[str, Any]) -> Iterable[float]:
    """Divide the start of our worker by taskiq's call; the processes of a run start once."""
    calls = [turn["p50_seconds"] for turn in _turns(report, "taskiq") if turn]
    starts = [turn["start_seconds"] for turn in _turns(report, _OURS) if turn]
    return [starts[0] / mean(calls)] if starts and calls else []


def _in_calls(report: dict[str, Any]) -> Iterable[float]:
    """Divide seconds by taskiq's call, which was measured before and after them."""
    calls = [call for call in report["taskiq_seconds"] if call is not None]
    return [seconds / mean(calls) for seconds in report["seconds"]] if calls else []


def _memory(report: dict[str, Any]) -> Iterable[float]:
    return [size / _MEGABYTE for size in report["worker_peak_bytes"] if size is not None]


def _store(operation: str, way: str) -> Callable[[dict[str, Any]], Iterable[float]]:
    def values(report: dict[str, Any]) -> Iterable[float]:
        for name, ratios in report["ratios"].items():
            if name.startswith(operation) and name.endswith(way):
                yield from ratios

    return values


GOALS: Final = (
    Goal(title="sandbox, p50 / taskiq's", part="one", values=_ratios("p50_seconds", "taskiq"), limit=0.7),
    Goal(
        title="the same, upper quartile",
        part="one",
        values=_ratios("p50_seconds", "taskiq"),
        limit=0.85,
        share=0.75,
    ),
    Goal(
        title="sandbox, p50 / raw Redis'", part="one", values=_ratios("p50_seconds", "raw-redis"), limit=2.3
    ),
    Goal(title="sandbox, p99 / its p50", part="one", values=_tails, limit=2.5),
    Goal(
        title="sandbox, calls/s / taskiq's, 100 in flight",
        part="one",
        values=_ratios("calls_per_second", "taskiq"),
        limit=2.5,
        at_least=True,
    ),
    Goal(
        title="sandbox, calls/s / Ray's, 100 in flight",
        part="ray",
        values=_ratios("calls_per_second", "ray"),
        limit=1.5,
        at_least=True,
    ),
    Goal(
        title="sandbox, calls/s / taskiq's, two workers each",
        part="two",
        values=_ratios("calls_per_second", "taskiq"),
        limit=2.5,
        at_least=True,
    ),
    Goal(title="10,000 calls that wait 1 s, in taskiq's calls", part="waiting", values=_in_calls, limit=2500),
    Goal(title="their worker, MB", part="waiting", values=_memory, limit=180),
    Goal(
        title="AGENT result to next request, in taskiq's calls", part="follow_up", values=_in_calls, limit=4
    ),
    Goal(
        title="post to first event / bare echo's",
        part="gateway",
        values=lambda report: report["ratios"]["post to event, time"],
        limit=2,
    ),
    *(
        Goal(
            title=f"store, SQLite {how}, {operation}, {way} / bare driver",
            part="kv",
            values=_store(f"sqlite {how} {operation}", way),
            limit=1.15 if operation == "set" else 1.3,
        )
        for how in ("normal", "full")
        for operation in ("get", "set")
        for way in ("one by one", "at once")
    ),
    Goal(title="worker's start to its first answer, in taskiq's calls", part="one", values=_start, limit=800),
)


def verdicts_of(found: dict[str, Reports]) -> list[Verdict]:
    """Return what the reports of the parts say about their goals."""
    return [
        Verdict(
            goal=goal,
            values=[value for report in found[goal.part] for value in goal.values(report)],
            runs=len(found[goal.part]),
        )
        for goal in GOALS
        if goal.part in found
    ]


def measure(
    run: Callable[[str], dict[str, Any]],
    parts: Iterable[str],
    *,
    seconds: float,
    on_failure: Callable[[subprocess.CalledProcessError], None],
) -> list[Verdict]:
    """Run the parts once, and those again whose goals are not decided, for at most that time.

    Args:
        run: runs one part and returns its report.
        seconds: after this time no part is run again.
        on_failure: called with the error of a part that failed, which is not run again.
    """
    found: dict[str, Reports] = {part: [] for part in parts}
    failed = set()
    ends = time.monotonic() + seconds
    open_parts = set(found)
    while open_parts:
        for part in found:
            if part in open_parts and (not found[part] or time.monotonic() < ends):
                try:
                    found[part].append(run(part))
                except subprocess.CalledProcessError as exc:
                    on_failure(exc)
                    failed.add(part)
        open_parts = {verdict.goal.part for verdict in verdicts_of(found) if not verdict.is_decided} - failed
        if time.monotonic() >= ends:
            break
    return verdicts_of(found)


def as_text(verdicts: Iterable[Verdict]) -> str:
    """Render the table: figures with their interval, and whether each goal is reached."""
    head = ["goal", "figure (95 %)", "limit", "", "turns, runs"]
    return "\n".join(table(head, [verdict.cells() for verdict in verdicts]))


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30, help="no part is run again later (default: 30)")
    parser.add_argument("--only", metavar="PARTS", help=f"comma-separated parts: {', '.join(_PARTS)}")
    parser.add_argument("--quick", action="store_true", help="one short run, to check that all of it works")
    words = parser.parse_args(argv)
    words.only = words.only.split(",") if words.only else list(_PARTS)
    unknown = set(words.only) - set(_PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a goal is missed or a benchmark failed."""
    interrupted_by_sigterm()
    options = parse(argv)

    def run(part: str) -> dict[str, Any]:
        return _run(*_PARTS[part], *(_QUICK[part] if options.quick else ()))

    failures: list[subprocess.CalledProcessError] = []
    seconds = 0 if options.quick else options.minutes * 60
    verdicts = measure(run, options.only, seconds=seconds, on_failure=failures.append)
    print(as_text(verdicts))
    for exc in failures:
        print(f"{' '.join(map(str, exc.cmd))} failed with exit code {exc.returncode}", file=sys.stderr)
    return 0 if not failures and all(verdict.is_reached for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
