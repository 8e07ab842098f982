"""Measure many calls that wait at the same time in one worker: ``python -m benchmarks.waiting_calls``.

One methods worker with enough concurrency for all of them, Redis and SQLite; this process calls as the
bridge does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import uvloop

from benchmarks.harness.limited import limit, limited_command
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, interrupted_by_sigterm, peak_bytes
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.served import call_served, served
from benchmarks.harness.yardstick import describe_beside, taskiq_seconds

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = ["main", "parse"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_METHOD: Final = "bench.wait.wait"
_CHAT: Final = "bench_chat"
_CALL_SECONDS: Final = 110
#: Calls that are started before the event loop runs the started ones.
_AT_ONCE: Final = 50
_MIB: Final = 1 << 20


async def _burst(services: Services, calls: int, seconds: float) -> float:
    """Make all calls at once; returns the seconds until the last answer."""
    from nekro.app.calls.dispatch import CallScope
    from nekro.wire.values import decode_value, encode_arguments

    entry = await served(services, _METHOD)
    scope = CallScope(chat=await services.chat(_CHAT), user_id=None)

    async def call() -> None:
        envelope = await call_served(
            services,
            entry,
            encode_arguments((seconds,), {}),
            scope,
            seconds=_CALL_SECONDS,
        )
        if decode_value(envelope.value_bytes(), max_bytes=1 << 16) != seconds:
            raise SystemExit("a call returned a wrong value")

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(calls):
            group.create_task(call())
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
    return time.perf_counter() - began


async def _measure(
    worker: Child, calls: int, seconds: float, repetitions: int
) -> tuple[list[float], list[int | None]]:
    """Return the seconds of each burst, and the worker's peak memory after each in bytes."""
    from broker_config.settings import Settings
    from nekro.app.services import Services

    services = Services.load(Settings.load(env_file=None), role="cli")
    await services.start()
    try:
        await _burst(services, 1, 0)
        before = peak_bytes([worker.pid])
        bursts, peaks = [], []
        for _ in range(repetitions):
            took = await _burst(services, calls, seconds)
            bursts.append(took)
            peak = peak_bytes([worker.pid])
            peaks.append(peak)
            print(
                f"{calls} calls that wait {seconds:g} s: {took:.2f} s, worker {peak / _MIB:.0f} MiB "
                f"({before / _MIB:.0f} MiB before; {(peak - before) / calls / 1024:.1f} KiB a call)"
            )
        return bursts, peaks
    finally:
        await services.close()


def _prepare() -> None:
    """Create the database before a worker is started."""
    from broker_config.settings import Settings
    from storage.migrate import upgrade

    settings = Settings.load(env_file=None)
    asyncio.run(upgrade(settings.database, settings.data_dir))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting_calls", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="calls at once (default: 10000)")
    parser.add_argument("--seconds", type=float, default=1, help="how long each waits (default: 1)")
    parser.add_argument("--repetitions", type=int, default=3, help="bursts, in one worker (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    before = taskiq_seconds()
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        os.environ |= {
            "NEKRO_BROKER__URL": server.url,
            "NEKRO_WORKERS__METHODS_CONCURRENCY": str(options.calls),
            "NEKRO_WORKERS__WAIT_SECONDS": str(_CALL_SECONDS),
            "NEKRO_DATA_DIR": str(Path(name) / "data"),
            "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
            "NEKRO_LOG__LEVEL": "WARNING",
        }
        limits = {"broker": {"max_queued": options.calls, "calls_per_chat": options.calls}}
        limit(limits)
        _prepare()
        command = [*limited_command(limits), "worker", "--lane", "methods"]
        worker = Child(command, log=Path(name) / "worker.log")
        try:
            bursts, peaks = uvloop.run(_measure(worker, options.calls, options.seconds, options.repetitions))
        finally:
            worker.stop()
        print(describe_machine(server.version), file=sys.stderr)
    after = taskiq_seconds()
    print(f"median: {describe_beside(median(bursts), before, after)}")
    if options.json is not None:
        found = {"seconds": bursts, "worker_peak_bytes": peaks, "taskiq_seconds": [before, after]}
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
