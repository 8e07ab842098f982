"""Measure the CPU cost of one Redis command on an event loop: ``python -m benchmarks.redis_exchanges``.

Sequential ``SET`` commands with redis-py's asyncio client, with a pipeline of it, and with ``RedisLink``,
alternating on one loop and one Redis. CPU is the time of the loop's thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import redis.asyncio
import uvloop

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from broker_config.settings import BrokerSettings
from nekro.broker.redis.link import RedisLink

__all__ = ["main", "parse"]

_VALUE: Final = b"x" * 200
_WARM_UP: Final = 200


async def _measure(url: str, exchanges: int, repetitions: int) -> dict[str, list[float]]:
    client = redis.asyncio.Redis.from_url(url)
    link = RedisLink(BrokerSettings(), url)

    async def by_pipeline() -> object:
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.set("k", _VALUE)
            return await pipeline.execute()

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "redis-py": lambda: client.set("k", _VALUE),
        "redis-py, pipeline": by_pipeline,
        "link": lambda: link.execute("SET", "k", _VALUE),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, exchange in ways.items():
            for _ in range(_WARM_UP):
                await exchange()
            began = time.thread_time()
            for _ in range(exchanges):
                await exchange()
            seconds[name].append((time.thread_time() - began) / exchanges)
    await client.aclose()
    await link.close()
    return seconds


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.redis_exchanges", description=__doc__)
    parser.add_argument(
        "--exchanges", type=int, default=3000, help="commands of each client per turn (default: 3000)"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="turns of each client (default: 5)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        seconds = uvloop.run(_measure(server.url, options.exchanges, options.repetitions))
        print(describe_machine(server.version), file=sys.stderr)
    for way, samples in seconds.items():
        ratios = [mine / theirs for mine, theirs in zip(samples, seconds["redis-py"], strict=True)]
        print(
            f"{way:20} {statistics.median(samples) * 1e6:7.1f} µs CPU; of redis-py's "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
