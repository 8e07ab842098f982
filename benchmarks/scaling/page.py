"""Render the figures of ``docs/scaling.md``, which are between two marks that a run replaces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.machine import Machine
from benchmarks.scaling.measure import Costs, Figures
from benchmarks.scaling.model import System, capacity, simulate, system_for
from benchmarks.scaling.tables import as_ms, as_table
from benchmarks.scaling.turn_page import turn_tables

__all__ = ["Taken", "as_markdown", "write_between_marks"]

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_LOADS = (0.5, 0.9)
_FLEETS = (10, 100, 1_000)
_REDISES = (1, 4, 16)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The measurements with machine, command and date."""

    figures: Figures
    machine: Machine
    command: str
    date: str


def as_markdown(taken: Taken, *, calls: int) -> str:
    """Render all figures; runs the simulations, of ``calls`` calls each."""
    costs = taken.figures.costs
    return "\n".join(
        [
            *_origin(taken),
            *_measured(taken.figures),
            *_price(costs),
            *_fleets(costs, calls),
            *_partitions(costs, calls),
            *turn_tables(taken.figures, turns=calls // 10),
        ]
    )


def write_between_marks(page: Path, text: str) -> None:
    """Replace the text between the marks of a page.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks {BEGIN} or {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def _origin(taken: Taken) -> Iterator[str]:
    machine = taken.machine
    busy = " **Other work was running: read these as lower bounds.**" if machine.busy else ""
    yield (
        f"Taken on {taken.date} by `{taken.command}` on {machine.cores} cores ({machine.cpu}), "
        f"{machine.kernel}, {machine.python}, {machine.redis}; load {machine.load_1m:.1f} at the "
        f"start.{busy} Workers, the one caller and Redis share these cores."
    )


def _measured(figures: Figures) -> Iterator[str]:
    yield from as_table(
        "### Measured: calls that do nothing",
        ("workers", "in flight", "calls/s", "p50", "p99"),
        (
            (
                one.workers,
                one.in_flight,
                f"{one.calls_per_second:,.0f}",
                as_ms(one.p50_seconds),
                as_ms(one.p99_seconds),
            )
            for one in figures.throughput
        ),
    )
    yield from as_table(
        "### Measured: calls that wait at the same time, on two workers",
        (
            "calls",
            "each waits",
            "p50 beyond that",
            "p99 beyond that",
            "worker memory per call",
            "Redis memory per call",
        ),
        (
            (
                f"{one.waiting:,}",
                f"{one.wait_seconds:.1f} s",
                as_ms(one.p50_extra_seconds),
                as_ms(one.p99_extra_seconds),
                f"{one.worker_bytes_per_call / 1024:.0f} KiB" if one.waiting >= 1000 else "",
                f"{one.redis_bytes_per_call / 1024:.1f} KiB" if one.waiting >= 1000 else "",
            )
            for one in figures.waiting
        ),
    )


def _price(costs: Costs) -> Iterator[str]:
    run = "no sandbox here" if costs.run_cpu_seconds is None else as_ms(costs.run_cpu_seconds)
    yield from as_table(
        "### The price of a call",
        ("what", "per call", "one core or server gives"),
        (
            _cpu("worker CPU", costs.worker_cpu_seconds_per_call),
            _cpu("caller CPU", costs.caller_cpu_seconds_per_call),
            _cpu("Redis CPU", costs.redis_cpu_seconds_per_call),
            _cpu("Redis CPU, with the results in a second Redis", costs.broker_cpu_seconds_per_call),
            _cpu("CPU of the second Redis", costs.results_cpu_seconds_per_call),
            ("Redis commands", f"{costs.redis_commands_per_call:.1f}", ""),
            ("network of Redis", f"{costs.redis_net_bytes_per_call / 1024:.1f} KiB", ""),
            ("CPU of a run of code, sandbox included", run, ""),
        ),
    )
    yield (
        f"\nAn idle worker sends {costs.idle_worker_commands_per_second:.1f} commands a second and takes "
        f"{100 * costs.idle_worker_redis_cpu_share:.3f} % of a Redis and "
        f"{100 * costs.idle_worker_cpu_share:.2f} % of a core."
    )


def _fleets(costs: Costs, calls: int) -> Iterator[str]:
    rows = []
    for workers in _FLEETS:
        system = system_for(costs, workers=workers)
        rows.append(_row(system, calls))
    yield from as_table(
        "### Simulated: one Redis, methods that wait 0.2 s",
        ("workers", "breaks first", "at calls/s", *_load_titles(), "Redis in use at 90 %"),
        rows,
    )


def _partitions(costs: Costs, calls: int) -> Iterator[str]:
    rows = []
    for redises in _REDISES:
        system = system_for(costs, workers=1_000, redises=redises)
        rows.append((redises, *_row(system, calls)[1:]))
    yield from as_table(
        "### Simulated: 1,000 workers, chats spread over several Redis servers by a hash",
        ("Redis servers", "breaks first", "at calls/s", *_load_titles(), "the busiest Redis at 90 %"),
        rows,
    )


def _row(system: System, calls: int) -> tuple[object, ...]:
    name, most = capacity(system).first
    if most < 1:
        return (
            f"{system.workers:,}",
            f"{name}: idle workers alone fill it",
            "0",
            *("" for _ in _LOADS),
            "100 %",
        )
    outcomes = [simulate(system, calls_per_second=load * most, calls=calls) for load in _LOADS]
    felt = (f"{as_ms(one.p50_seconds)} / {as_ms(one.p99_seconds)}" for one in outcomes)
    return (f"{system.workers:,}", name, f"{most:,.0f}", *felt, f"{100 * outcomes[-1].redis_use:.0f} %")


def _load_titles() -> tuple[str, ...]:
    return tuple(f"p50 / p99 at {100 * load:.0f} %" for load in _LOADS)


def _cpu(what: str, seconds: float) -> tuple[str, str, str]:
    return what, as_ms(seconds), f"{1 / seconds:,.0f} calls/s" if seconds > 0 else ""
