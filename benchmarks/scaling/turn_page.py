"""Render the figures of whole turns: their costs, the check, the limits, the simulations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.scaling.limits import (
    CHATS,
    CONNECTIONS,
    DATABASE_CORES,
    FULL,
    MIX,
    fleet_costs,
    limits,
)
from benchmarks.scaling.measure import Costs, Figures
from benchmarks.scaling.model import broker_shares
from benchmarks.scaling.streams import StreamCosts
from benchmarks.scaling.tables import as_ms, as_table
from benchmarks.scaling.turn_model import Cell, Outage, cell_for, simulate_turns
from benchmarks.scaling.turns import CHECK, FIT, Spent, Turns, part_costs

__all__ = ["turn_tables"]

_PROCESSES = ("gateway", "rounds", "methods", "redis", "postgresql")
_COUNTS = ("commits", "statements", "wal_bytes", "redis_commands", "announcements")
_COUNT_TITLES = ("commits", "statements", "WAL", "Redis commands", "announcements")
_WORKERS = 1_000
_PER_HOUR = (1.0, 10.0, 60.0)
#: Turns per second of a simulated cell, of the simulated outages, and their lengths: a Sentinel's failover
#: of a killed and of a frozen primary (docs/operations.md).
_CELL_TURNS = 100.0
_OUTAGE_TURNS = 20.0
_OUTAGES = (6.0, 13.0)
_HOST_CORES = 16
#: Of a server with a disk of its own.
_FAST_SYNC_SECONDS = 0.001


def turn_tables(figures: Figures, *, turns: int) -> Iterator[str]:
    """Yield all tables of turns; runs the simulations, of ``turns`` turns each."""
    yield from _streams(figures.streams)
    if figures.turns is None:
        yield "\nWhole turns were not measured: PostgreSQL cannot run here."
        return
    yield from _parts(figures.turns)
    yield from _check(figures.turns)
    yield from _first_limits(figures.costs, figures.turns, figures.streams)
    yield from _chats(figures.costs, figures.turns, figures.streams)
    yield from _cells(figures, turns)
    yield from _outages(figures, turns)


def _streams(costs: StreamCosts) -> Iterator[str]:
    yield from as_table(
        "### Measured: streams of a gateway",
        ("what", "CPU of the gateway"),
        (
            ("opening a stream", as_ms(costs.opening_cpu_seconds)),
            ("an event of a chat with one reader", as_ms(costs.event_cpu_seconds)),
            ("the same event for each further reader", as_ms(costs.delivery_cpu_seconds)),
            ("an announcement of a chat without readers here", as_ms(costs.foreign_cpu_seconds)),
        ),
    )
    yield (
        f"\nAn open stream takes {costs.bytes_per_stream / 1024:.0f} KiB. An announcement takes "
        f"{as_ms(costs.foreign_redis_cpu_seconds)} of Redis, with one gateway."
    )


def _row(name: str, spent: Spent) -> tuple[str, ...]:
    cpu = (as_ms(spent.cpu_seconds.get(process, 0.0)) for process in _PROCESSES)
    return (
        name,
        *cpu,
        f"{spent.commits:.1f}",
        f"{spent.statements:.0f}",
        f"{spent.wal_bytes / 1024:.1f} KiB",
        f"{spent.redis_commands:.0f}",
        f"{spent.announcements:.1f}",
    )


def _parts(turns: Turns) -> Iterator[str]:
    costs = part_costs(turns.fit)
    yield from as_table(
        "### Measured: the parts of a turn, on PostgreSQL",
        ("part", *_PROCESSES, *_COUNT_TITLES),
        (
            _row("a turn with words only", costs.words),
            _row("a round with code and an AGENT call", costs.code_round),
            _row("a TOOL call", costs.tool),
            _row("a BEHAVIOR call (recorded)", costs.note),
            _row("a second without turns", turns.idle),
        ),
    )
    memory = ", ".join(f"{name} {turns.idle_bytes[name] >> 20}" for name in _PROCESSES)
    yield (
        "\nCPU time of each process and those below it (sandboxes are below `rounds`). Commits are"
        " transactions that write; statements include BEGIN and COMMIT. Load while the turns ran:"
        f" {turns.load_1m:.0f}. A sync of a page took {as_ms(turns.sync_seconds)}."
        f" Proportional memory without turns, MiB: {memory}."
    )


def _check(turns: Turns) -> Iterator[str]:
    expected = part_costs(turns.fit).of(CHECK)
    rows = []
    values = {name: expected.cpu_seconds[name] for name in _PROCESSES}
    for name, predicted in {**values, "all": expected.total_cpu_seconds}.items():
        found = None
        if turns.check is not None:
            found = turns.check.total_cpu_seconds if name == "all" else turns.check.cpu_seconds[name]
        rows.append(_compared(f"CPU ms, {name}", 1e3 * predicted, None if found is None else 1e3 * found))
    for name, title in zip(_COUNTS, _COUNT_TITLES, strict=True):
        scale = 1 / 1024 if name == "wal_bytes" else 1
        found = None if turns.check is None else scale * getattr(turns.check, name)
        rows.append(
            _compared(f"{title}{' KiB' if scale < 1 else ''}", scale * getattr(expected, name), found)
        )
    yield from as_table(
        f"### Check: a turn of {CHECK.name()}", ("per turn", "predicted", "measured", "error"), rows
    )
    mixes = "; ".join(mix.name() for mix in FIT)
    yield f"\nThe parts come from other mixes ({mixes}); this one is not among them."


def _compared(name: str, predicted: float, found: float | None) -> tuple[str, ...]:
    if found is None:
        return (name, f"{predicted:,.1f}", "", "")
    error = f"{100 * (predicted / found - 1):+.0f} %" if found else ""
    return (name, f"{predicted:,.1f}", f"{found:,.1f}", error)


def _first_limits(costs: Costs, turns: Turns, streams: StreamCosts) -> Iterator[str]:
    yield from as_table(
        f"### Computed: what more workers do not help, {_WORKERS:,} workers, a million chats",
        ("part", "turns/s", "per chat and hour", "cure", "turns/s then", "per chat and hour"),
        (
            (
                one.part,
                f"{one.turns_per_second:,.0f}",
                f"{one.per_chat_and_hour(one.turns_per_second):.1f}",
                one.cure,
                f"{one.cured_turns_per_second:,.0f}",
                f"{one.per_chat_and_hour(one.cured_turns_per_second):.1f}",
            )
            for one in limits(costs, turns, streams, workers=_WORKERS)
        ),
    )
    yield f"\nA turn here and below: {MIX.name()}. No part is more than {100 * FULL:.0f} % in use."


def _chats(costs: Costs, turns: Turns, streams: StreamCosts) -> Iterator[str]:
    spent = fleet_costs(costs, turns).of(MIX)
    runs = MIX.code_rounds * (costs.run_cpu_seconds or 0.0)
    rows = []
    for per_hour in _PER_HOUR:
        rate = CHATS * per_hour / 3600
        loops = rate * max(0.0, spent.cpu_seconds["rounds"] - runs) / FULL
        foreign = rate * spent.announcements * streams.foreign_cpu_seconds
        rows.append(
            (
                f"{per_hour:g}",
                f"{rate:,.0f}",
                f"{loops:,.0f}",
                f"{rate * runs / FULL:,.0f}",
                f"{math.ceil((loops + rate * runs / FULL) / _HOST_CORES):,}",
                f"{math.ceil(loops) * turns.idle_bytes['rounds'] / 2**30:,.0f}",
                f"{rate * spent.cpu_seconds['methods'] / FULL:,.0f}",
                f"{rate * spent.cpu_seconds['gateway'] / FULL:,.0f}",
                f"{100 * foreign:,.0f} %",
                f"{rate * spent.cpu_seconds['redis'] / FULL:,.2f}",
                f"{rate * spent.cpu_seconds['postgresql'] / FULL:,.0f}",
                f"{rate * spent.commits:,.0f}",
                f"{rate * spent.wal_bytes / 2**20:,.0f}",
            )
        )
    yield from as_table(
        "### Computed: a million chats",
        (
            "turns per chat and hour",
            "turns/s",
            "cores: rounds",
            "sandboxes",
            f"hosts of {_HOST_CORES} cores for both",
            "their memory without runs, GiB",
            "methods",
            "gateways",
            "a gateway's core for others' announcements",
            "Redis threads",
            "cores: PostgreSQL",
            "commits/s",
            "WAL MiB/s",
        ),
        rows,
    )


def _cell(figures: Figures, **given: object) -> Cell:
    assert figures.turns is not None
    fields = {
        "turns_per_second": _CELL_TURNS,
        "broker_shares": (1.0,),
        "idle_share": min(0.5, _WORKERS * figures.costs.idle_worker_redis_cpu_share),
        "database_cores": DATABASE_CORES,
        "connections": CONNECTIONS,
        "sync_seconds": figures.turns.sync_seconds,
        **given,
    }
    return cell_for(
        fleet_costs(figures.costs, figures.turns),
        MIX,
        run_seconds=figures.costs.run_cpu_seconds or 0.0,
        full=FULL,
        **fields,  # type: ignore[arg-type]
    )


def _cells(figures: Figures, turns: int) -> Iterator[str]:
    assert figures.turns is not None
    sync = as_ms(figures.turns.sync_seconds)
    spent = fleet_costs(figures.costs, figures.turns).of(MIX)
    half = _CELL_TURNS * spent.cpu_seconds["postgresql"]
    cells = {
        f"{CONNECTIONS} connections, a sync takes {sync}": _cell(figures),
        "a sync takes 1 ms": _cell(figures, sync_seconds=_FAST_SYNC_SECONDS),
        "`synchronous_commit=off`": _cell(figures, sync_seconds=0.0),
        f"a pool of 10, sync {sync}": _cell(figures, connections=10),
        f"{half / 0.9:.1f} cores of PostgreSQL: 90 % in use": _cell(
            figures, database_cores=max(1, round(half / 0.9))
        ),
        "two brokers": _cell(figures, broker_shares=broker_shares(2)),
    }
    rows = []
    for name, cell in cells.items():
        found = simulate_turns(cell, turns=turns)
        rows.append(
            (
                name,
                f"{as_ms(found.p50_seconds)} / {as_ms(found.p99_seconds)}",
                as_ms(found.commit_p99_seconds),
                f"{found.commits_per_sync:.1f}",
                found.connections_used,
                as_ms(found.connection_p99_seconds),
            )
        )
    yield from as_table(
        f"### Simulated: {_CELL_TURNS:.0f} turns/s on one database",
        (
            "database",
            "turn without the model, p50 / p99",
            "sync, p99",
            "commits per sync",
            "most connections in use",
            "wait for a connection, p99",
        ),
        rows,
    )


def _outages(figures: Figures, turns: int) -> Iterator[str]:
    rows = []
    for brokers in (1, 2):
        for seconds in _OUTAGES:
            outage = Outage(begin_seconds=turns / _OUTAGE_TURNS / 3, seconds=seconds)
            cell = _cell(
                figures,
                turns_per_second=_OUTAGE_TURNS,
                broker_shares=broker_shares(brokers),
                outage=outage,
            )
            found = simulate_turns(replace(cell, idle_share=0.0), turns=turns)
            after = found.recovered_seconds
            rows.append(
                (
                    brokers,
                    f"{seconds:.0f} s",
                    f"{found.calls_refused:,}",
                    f"{found.turns_delayed:,}",
                    f"{found.turns_delayed / (_OUTAGE_TURNS * seconds):.2f}",
                    "not within the simulation" if after is None else f"{after:.0f} s",
                )
            )
    yield from as_table(
        f"### Simulated: a broker fails over, {_OUTAGE_TURNS:.0f} turns/s",
        (
            "brokers",
            "without a primary",
            "calls refused",
            "turns delayed",
            "of the turns that began meanwhile",
            "p99 at most twice that of before, after",
        ),
        rows,
    )
    lengths = " and ".join(f"{one:.0f}" for one in _OUTAGES)
    yield (
        f"\nOutages of {lengths} s: a primary that was killed, and one that was frozen"
        " ([measured](operations.md#redis))."
    )
