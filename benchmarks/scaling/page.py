"""Render the figures of ``docs/scaling.md``, which are between two marks that a run replaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.machine import Machine
from benchmarks.scaling.measure import Costs, Figures
from benchmarks.scaling.model import System, capacity, simulate, system_for

__all__ = ["Chats", "Taken", "as_markdown", "write_between_marks"]

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
_LOADS = (0.5, 0.9)
_FLEETS = (10, 100, 1_000)
_REDISES = (1, 4, 16)
#: Highest average use of a component: above it the p99 latency grows quickly.
_FULL = 0.6


@dataclass(frozen=True, kw_only=True)
class Chats:
    """The load of a million chats; assumptions, stated with the figures."""

    chats: int = 1_000_000
    turns_per_hour: float = 1.0
    rounds_per_turn: float = 2.0
    calls_per_round: float = 3.0

    @property
    def rounds_per_second(self) -> float:
        """Rounds of all chats."""
        return self.chats * self.turns_per_hour * self.rounds_per_turn / 3600

    @property
    def calls_per_second(self) -> float:
        """Calls of all chats."""
        return self.rounds_per_second * self.calls_per_round


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
            *_chats(costs, calls),
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
    yield from _table(
        "### Measured: calls that do nothing",
        ("workers", "in flight", "calls/s", "p50", "p99"),
        (
            (
                one.workers,
                one.in_flight,
                f"{one.calls_per_second:,.0f}",
                _ms(one.p50_seconds),
                _ms(one.p99_seconds),
            )
            for one in figures.throughput
        ),
    )
    yield from _table(
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
                _ms(one.p50_extra_seconds),
                _ms(one.p99_extra_seconds),
                f"{one.worker_bytes_per_call / 1024:.0f} KiB" if one.waiting >= 1000 else "",
                f"{one.redis_bytes_per_call / 1024:.1f} KiB" if one.waiting >= 1000 else "",
            )
            for one in figures.waiting
        ),
    )


def _price(costs: Costs) -> Iterator[str]:
    run = "no sandbox here" if costs.run_cpu_seconds is None else _ms(costs.run_cpu_seconds)
    yield from _table(
        "### The price of a call",
        ("what", "per call", "one core or server gives"),
        (
            ("worker CPU", _ms(costs.worker_cpu_seconds_per_call), _rate(costs.worker_cpu_seconds_per_call)),
            ("caller CPU", _ms(costs.caller_cpu_seconds_per_call), _rate(costs.caller_cpu_seconds_per_call)),
            ("Redis CPU", _ms(costs.redis_cpu_seconds_per_call), _rate(costs.redis_cpu_seconds_per_call)),
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
    yield from _table(
        "### Simulated: one Redis, methods that wait 0.2 s",
        ("workers", "breaks first", "at calls/s", *_load_titles(), "Redis in use at 90 %"),
        rows,
    )


def _partitions(costs: Costs, calls: int) -> Iterator[str]:
    rows = []
    for redises in _REDISES:
        system = system_for(costs, workers=1_000, redises=redises)
        rows.append((redises, *_row(system, calls)[1:]))
    yield from _table(
        "### Simulated: 1,000 workers, calls spread over several Redis servers",
        ("Redis servers", "breaks first", "at calls/s", *_load_titles(), "Redis in use at 90 %"),
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
    felt = (f"{_ms(one.p50_seconds)} / {_ms(one.p99_seconds)}" for one in outcomes)
    return (f"{system.workers:,}", name, f"{most:,.0f}", *felt, f"{100 * outcomes[-1].redis_use:.0f} %")


def _chats(costs: Costs, calls: int) -> Iterator[str]:
    rows = []
    for turns in (1.0, 10.0, 60.0):
        load = Chats(turns_per_hour=turns)
        workers = max(2, round(load.calls_per_second * costs.worker_cpu_seconds_per_call / _FULL))
        need = (
            load.calls_per_second * costs.redis_cpu_seconds_per_call
            + workers * costs.idle_worker_redis_cpu_share
        )
        redises = max(1, -(-round(100 * need) // round(100 * _FULL)))
        cores = load.calls_per_second * costs.caller_cpu_seconds_per_call
        cores += load.rounds_per_second * (costs.run_cpu_seconds or 0.0)
        system = system_for(costs, workers=workers, redises=redises)
        outcome = simulate(system, calls_per_second=load.calls_per_second, calls=calls)
        rows.append(
            (
                f"{turns:g}",
                f"{load.rounds_per_second:,.0f}",
                f"{load.calls_per_second:,.0f}",
                f"{workers:,}",
                f"{cores / _FULL:,.0f}",
                redises,
                f"{_ms(outcome.p50_seconds)} / {_ms(outcome.p99_seconds)}",
            )
        )
    yield from _table(
        "### Simulated: a million chats",
        (
            "turns per chat and hour",
            "rounds/s",
            "calls/s",
            "methods workers",
            "cores for rounds",
            "Redis servers",
            "p50 / p99",
        ),
        rows,
    )
    yield (
        f"\nAssumed: {Chats().rounds_per_turn:g} rounds in a turn, {Chats().calls_per_round:g} calls in "
        f"a round, every part at most {100 * _FULL:.0f} % in use; the model's own time and the database "
        "are not in it."
    )


def _load_titles() -> tuple[str, ...]:
    return tuple(f"p50 / p99 at {100 * load:.0f} %" for load in _LOADS)


def _table(title: str, head: Sequence[str], rows: object) -> Iterator[str]:
    yield f"\n{title}\n"
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:  # type: ignore[attr-defined]
        yield f"| {' | '.join(map(str, row))} |"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.0f} calls/s" if seconds > 0 else ""
