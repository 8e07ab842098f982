"""Render the results of a run as text, and as plain data for ``--json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness.contender import Contender
from benchmarks.harness.figures import KINDS, Better, Figures, Kind, Spread, ratios, spread, values_of
from benchmarks.harness.machine import Machine
from benchmarks.harness.turn import Plan

__all__ = ["Result", "Run", "as_data", "as_text", "table"]

_ABSENT = "-"


@dataclass(kw_only=True)
class Result:
    """The turns of one contender; None where it has no figures of that turn."""

    contender: Contender
    turns: list[Figures | None] = field(default_factory=list)
    #: Why it was not measured; None when it was.
    absent: str | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether any turn has figures."""
        return any(turn is not None for turn in self.turns)


@dataclass(kw_only=True)
class Run:
    """The data of a report."""

    results: list[Result]
    plan: Plan
    machine: Machine
    versions: dict[str, str]
    command: str

    def comparisons(self) -> list[tuple[Result, list[Result]]]:
        """Return (one of ours, the peers that were measured) for each of ours that was measured."""
        measured = [result for result in self.results if result.measured]
        peers = [result for result in measured if not result.contender.ours]
        return [(result, peers) for result in measured if result.contender.ours and peers]


def as_text(run: Run) -> str:
    """Render the report: ratios, figures, missing contenders, machine and versions."""
    return "\n".join([*_ratio_lines(run), *_figure_lines(run), *_absence_lines(run), *_origin_lines(run)])


def as_data(run: Run) -> dict[str, Any]:
    """Return the report as JSON types; seconds and bytes, unrounded, of every turn."""
    return {
        "ratios": {
            own.contender.name: {peer.contender.name: _ratio_data(own, peer) for peer in peers}
            for own, peers in run.comparisons()
        },
        "contenders": {
            result.contender.name: {
                "about": result.contender.about,
                "ours": result.contender.ours,
                "absent": result.absent,
                "failures": result.failures,
                "turns": [None if turn is None else asdict(turn) for turn in result.turns],
                "spread": {kind.field: _spread_data(_spread_of(result, kind)) for kind in KINDS},
            }
            for result in run.results
        },
        "plan": asdict(run.plan),
        "machine": {**asdict(run.machine), "busy": run.machine.busy},
        "versions": run.versions,
        "command": run.command,
    }


def _spread_of(result: Result, kind: Kind) -> Spread | None:
    return spread(value for value in values_of(result.turns, kind.field) if value is not None)


def _ratio_data(own: Result, peer: Result) -> dict[str, Any]:
    return {kind.field: _spread_data(ratios(own.turns, peer.turns, kind.field)) for kind in KINDS}


def _spread_data(value: Spread | None) -> dict[str, float] | None:
    return None if value is None else asdict(value)


def _ratio_lines(run: Run) -> list[str]:
    lines = []
    for own, peers in run.comparisons():
        rows = [[f"/ {peer.contender.name}", *_ratio_cells(own, peer)] for peer in peers]
        lines += [f"{own.contender.name} divided by each peer, within each turn: median (least–greatest)"]
        lines += table(["", *(f"{kind.title.split()[0]} {_arrow(kind)}" for kind in KINDS)], rows)
        lines += ["↓ better below 1, ↑ better above 1", ""]
    return lines or ["No ratios: one of ours and one of the peers must be measured for any.", ""]


def _arrow(kind: Kind) -> str:
    return "↓" if kind.better is Better.LOWER else "↑"


def _ratio_cells(own: Result, peer: Result) -> list[str]:
    return [_cell(ratios(own.turns, peer.turns, kind.field), scale=1, digits=2) for kind in KINDS]


def _figure_lines(run: Run) -> list[str]:
    measured = [result for result in run.results if result.measured]
    rows = [
        [result.contender.name, *(_cell(_spread_of(result, kind), kind.scale, kind.digits) for kind in KINDS)]
        for result in measured
    ]
    about = [f"  {result.contender.name}: {result.contender.about}" for result in measured]
    return [
        "Figures: median (least–greatest)",
        *table(["", *(kind.title for kind in KINDS)], rows),
        *about,
        "",
    ]


def _absence_lines(run: Run) -> list[str]:
    lines = [f"{result.contender.name}: {result.absent}" for result in run.results if result.absent]
    lines += [f"{result.contender.name} failed: {why}" for result in run.results for why in result.failures]
    return [*lines, ""] if lines else []


def _origin_lines(run: Run) -> list[str]:
    plan, machine = run.plan, run.machine
    turns = max(len(result.turns) for result in run.results)
    lines = [
        f"Runs: {turns} turns of each contender, all of them running;"
        f" per turn {plan.sequential_calls} sequential calls after {plan.sequential_warm_up} of warm-up,"
        f" {plan.flood_calls} calls with {plan.in_flight} in flight after {plan.flood_warm_up};"
        f" worker processes: {plan.workers}",
        f"Machine: {machine.cores} cores ({machine.cpu}), {machine.kernel}, {machine.python},"
        f" {machine.redis}, load {machine.load_1m:.2f} at the start",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        f"Command: {run.command}",
    ]
    if machine.busy:
        lines.append("WARNING: the machine was not idle; take ratios with care and figures as rough.")
    return lines


def _cell(value: Spread | None, scale: float, digits: int) -> str:
    if value is None:
        return _ABSENT
    median, low, high = (f"{part * scale:.{digits}f}" for part in (value.median, value.low, value.high))
    return f"{median} ({low}–{high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of columns, the first aligned to the left and the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
