"""CPU time and commits of PostgreSQL for each turn: one fleet, and the chats over two fleets, in turns.

``python -m benchmarks.fleets [--turns 20] [--chats 8] [--pairs 3] [--json FILE]``. Each fleet has a gateway,
two workers, a Redis and a PostgreSQL of its own. What shares the chats out is outside of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import psycopg

from benchmarks.agents.script import TurnModel
from benchmarks.agents.systems import Running, our_system
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_version
from benchmarks.harness.report import table
from benchmarks.harness.usage import tree_cpu_seconds
from benchmarks.turns import Person

__all__ = ["main", "parse"]

_REQUEST_SECONDS: Final = 90.0
#: Time without turns, whose cost is not a turn's.
_IDLE_SECONDS: Final = 10.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20, help="turns of each chat (default: 20)")
    parser.add_argument("--chats", type=int, default=8, help="chats at once, of all fleets (default: 8)")
    parser.add_argument("--pairs", type=int, default=3, help="runs with each number of fleets (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures of all runs")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, and print a table."""
    interrupted_by_sigterm()
    args = parse()
    #: By number of fleets: of each run the figures of each database.
    runs: dict[int, list[list[tuple[float, float]]]] = {1: [], 2: []}
    for _ in range(args.pairs):
        for fleets, found in runs.items():
            found.append(asyncio.run(_run(fleets, args.turns, args.chats)))
    print(describe_machine(redis_version()), file=sys.stderr)
    alone = [statistics.median(run[0][part] for run in runs[1]) for part in range(2)]
    rows = []
    for fleets, found in runs.items():
        cpu, commits = (
            [statistics.median(run[n][part] for run in found) for n in range(fleets)] for part in range(2)
        )
        rows.append(
            [
                str(fleets),
                " + ".join(f"{seconds * 1e3:.1f}" for seconds in cpu),
                f"{max(cpu) / alone[0]:.2f}",
                " + ".join(f"{number:.1f}" for number in commits),
                f"{max(commits) / alone[1]:.2f}",
            ]
        )
    head = ["fleets", "CPU ms per turn, database by database", "busiest", "commits per turn", "busiest"]
    print(*table(head, rows), sep="\n")
    if args.json is not None:
        args.json.write_text(json.dumps({"cpu_seconds_and_commits_per_turn": runs}))


async def _run(fleets: int, turns: int, chats: int) -> list[tuple[float, float]]:
    """Return what each database took for each turn of all fleets: seconds of CPU, and commits."""
    model = TurnModel()
    url = await model.start()
    with (
        tempfile.TemporaryDirectory(prefix="fleets-", ignore_cleanup_errors=True) as made,
        ExitStack() as stack,
    ):
        try:
            systems: list[Running] = []
            for number in range(fleets):
                directory = Path(made, str(number))
                directory.mkdir()
                started = our_system(directory, url, postgresql=True)
                systems.append(await asyncio.to_thread(stack.enter_context, started))
            return await _measured(systems, turns, chats // fleets)
        finally:
            await asyncio.to_thread(stack.close)
            model.stop()


async def _measured(systems: Sequence[Running], turns: int, chats: int) -> list[tuple[float, float]]:
    await _load(systems, max(1, turns // 5), chats)
    before = [_spent(system) for system in systems]
    await asyncio.sleep(_IDLE_SECONDS)
    idle = [_less(_spent(system), then) for system, then in zip(systems, before, strict=True)]
    before, began = [_spent(system) for system in systems], asyncio.get_running_loop().time()
    await _load(systems, turns, chats)
    periods = (asyncio.get_running_loop().time() - began) / _IDLE_SECONDS
    after = [_less(_spent(system), then) for system, then in zip(systems, before, strict=True)]
    count = turns * chats * len(systems)
    return [
        ((cpu - periods * idle_cpu) / count, (commits - periods * idle_commits) / count)
        for (cpu, commits), (idle_cpu, idle_commits) in zip(after, idle, strict=True)
    ]


async def _load(systems: Sequence[Running], turns: int, chats: int) -> None:
    async with asyncio.TaskGroup() as group:
        for system in systems:
            group.create_task(_turns(system, turns, chats))


async def _turns(system: Running, turns: int, chats: int) -> None:
    limits = httpx.Limits(max_connections=chats, keepalive_expiry=2)
    async with httpx.AsyncClient(
        base_url=system.url, headers=system.headers, limits=limits, timeout=_REQUEST_SECONDS
    ) as http:
        await Person(http, system).turns(turns, chats=chats)


def _spent(system: Running) -> tuple[float, float]:
    assert system.database is not None
    cpu = tree_cpu_seconds(system.processes()["postgresql"])
    with psycopg.connect(system.database.url) as connection:
        # The next transaction's id, which only transactions that write take.
        row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    return cpu, float(row[0])


def _less(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] - other[0], one[1] - other[1]


if __name__ == "__main__":
    main()
