"""Compare recorded calls on two databases: ``python -m benchmarks.pooled_calls DIRECT POOLED``.

The URLs name two scratch databases of one PostgreSQL, which are migrated and filled: the second is reached
through a pooler (``?pool_mode=transaction``). Two fleets on one Redis, each with a methods worker, run calls
of a BEHAVIOR method in turns: one call after the other, then several at once. The fleet that begins changes
with each pair of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvloop

from benchmarks.harness.figures import spread
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.served import call_served, served

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = ["main", "parse"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_NEKRO: Final = str(Path(sys.executable).with_name("nekro"))
_METHOD: Final = "bench.record.record"
_CALL_SECONDS: Final = 110


@asynccontextmanager
async def _fleet(directory: Path, redis_url: str, database_url: str) -> AsyncIterator[Services]:
    """Migrate the database and start a worker; yields the services of the calling side."""
    from broker_config.settings import Settings
    from nekro.app.services import Services

    directory.mkdir()
    environment = os.environ | {
        "NEKRO_BROKER__URL": redis_url,
        "NEKRO_BROKER__KEY_PREFIX": f"{directory.name}:",
        "NEKRO_DATABASE__URL": database_url,
        "NEKRO_DATA_DIR": str(directory / "data"),
        "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
        "NEKRO_LOG__LEVEL": "WARNING",
        "NEKRO_SECURITY__SIGNING_KEY": "benchmark",
    }
    subprocess.run([_NEKRO, "db", "upgrade"], env=environment, check=True, stdout=sys.stderr)
    worker = Child([_NEKRO, "worker", "--lane", "methods"], log=directory / "log", environment=environment)
    os.environ.update(environment)
    services = Services.load(Settings.load(env_file=None), role="cli")
    await services.start()
    try:
        yield services
    finally:
        await services.close()
        worker.stop()


async def _turn(services: Services, calls: int, *, at_once: int) -> float:
    """Make calls; returns the seconds per call."""
    from nekro.app.calls.dispatch import CallScope
    from nekro.wire.values import encode_arguments

    entry = await served(services, _METHOD)
    scope = CallScope(chat=await services.chat("bench_chat"), user_id=None)
    numbers = iter(range(calls))

    async def work() -> None:
        for _ in numbers:
            await call_served(
                services,
                entry,
                encode_arguments(("text",), {}),
                scope,
                seconds=_CALL_SECONDS,
            )

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return (time.perf_counter() - began) / calls


async def _measure(options: argparse.Namespace, directory: Path, redis_url: str) -> None:
    urls = {"direct": options.direct, "pooled": options.pooled}
    async with AsyncExitStack() as stack:
        fleets = {
            name: await stack.enter_async_context(_fleet(directory / name, redis_url, url))
            for name, url in urls.items()
        }
        for at_once in (1, options.at_once):
            seconds: dict[str, list[float]] = {name: [] for name in fleets}
            for number in range(options.pairs + 1):
                for name in sorted(fleets, reverse=number % 2 == 1):
                    seconds[name].append(await _turn(fleets[name], options.calls, at_once=at_once))
            _print(at_once, {name: figures[1:] for name, figures in seconds.items()})  # the first warms up


def _print(at_once: int, seconds: dict[str, list[float]]) -> None:
    pairs = zip(seconds["pooled"], seconds["direct"], strict=True)
    rows = {"pooled / direct": ([pooled / direct for pooled, direct in pairs], "")}
    rows |= {name: ([1000 * one for one in figures], " ms per call") for name, figures in seconds.items()}
    for title, (values, unit) in rows.items():
        if (one := spread(values)) is not None:
            print(f"{at_once} at once, {title}: {one.median:.3g} ({one.low:.3g} to {one.high:.3g}){unit}")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooled_calls", description=__doc__)
    parser.add_argument("direct", metavar="DIRECT", help="URL of a database")
    parser.add_argument("pooled", metavar="POOLED", help="URL of another one, through a pooler")
    parser.add_argument("--pairs", type=int, default=10, help="pairs of turns (default: 10)")
    parser.add_argument("--calls", type=int, default=300, help="calls of a turn (default: 300)")
    parser.add_argument("--at-once", type=int, default=16, help="of the second series (default: 16)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        print(describe_machine(server.version), file=sys.stderr)
        uvloop.run(_measure(options, Path(name), server.url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
