"""Redis CPU time of a call on each server, with the chats on one server and partitioned over two, in turns.

``python -m benchmarks.partitions [--calls 5000] [--pairs 3] [--json FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.redis_server import RedisServer, redis_server, redis_version
from benchmarks.scaling.fleet import Caller, Fleet, opened_caller, running_fleet

#: Calls in flight for each server: a Redis that has fewer commands at a time needs more time for each.
IN_FLIGHT = 200
_VARIABLE = "NEKRO_BROKER__PARTITIONS"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=5000, help="calls of each run (default: 5000)")
    parser.add_argument("--pairs", type=int, default=3, help="runs with each number of servers (default: 3)")
    parser.add_argument("--json", type=Path, help="also write the figures of all runs")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, and print a table."""
    args = parse()
    runs: dict[int, list[list[float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        for number in range(args.pairs):
            for servers, found in runs.items():
                found.append(_run(directory / f"{number}-{servers}", servers, args.calls))
    print(describe_machine(redis_version()), file=sys.stderr)
    print("| servers | Redis CPU per call, server by server | share of the busiest |")
    print("|---|---|---|")
    alone = statistics.median(run[0] for run in runs[1])
    for servers, found in runs.items():
        each = [statistics.median(run[n] for run in found) for n in range(servers)]
        texts = " + ".join(f"{seconds * 1e6:.1f} µs" for seconds in each)
        print(f"| {servers} | {texts} | {max(each) / alone:.2f} |")
    if args.json is not None:
        args.json.write_text(json.dumps({"redis_cpu_seconds_per_call": runs}))


def _run(directory: Path, servers: int, calls: int) -> list[float]:
    """Return the CPU time of each server per call."""
    directory.mkdir()
    (directory / "second").mkdir()
    with (
        redis_server(directory) as first,
        redis_server(directory / "second") as second,
        _partitions(second if servers == 2 else None),
        running_fleet(first, directory / "fleet", workers=2, concurrency=200) as fleet,
    ):
        return asyncio.run(_measured(fleet, [first, second][:servers], calls))


@contextmanager
def _partitions(server: RedisServer | None) -> Iterator[None]:
    if server is not None:
        os.environ[_VARIABLE] = server.url
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)


async def _measured(fleet: Fleet, servers: list[RedisServer], calls: int) -> list[float]:
    async with opened_caller(fleet) as caller:
        in_flight = IN_FLIGHT * len(servers)
        await _flood(caller, calls // 5, in_flight)
        before = [_cpu_seconds(server) for server in servers]
        await _flood(caller, calls, in_flight)
        return [(_cpu_seconds(one) - then) / calls for one, then in zip(servers, before, strict=True)]


async def _flood(caller: Caller, calls: int, in_flight: int) -> None:
    numbers = iter(range(calls))

    async def lane() -> None:
        for number in numbers:
            await caller.call(number, 0)

    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(lane())


def _cpu_seconds(server: RedisServer) -> float:
    with redis.Redis.from_url(server.url) as client:
        info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


if __name__ == "__main__":
    main()
