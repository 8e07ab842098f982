"""Measure the effect of one chat's large arguments on another chat: ``python -m benchmarks.heavy_arguments``.

One methods worker, Redis and SQLite. A separate process makes 200 calls with each kind of large
arguments, with as many in flight as a run may have; this process makes small sequential calls for
another chat, before and meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop

from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import Child, interrupted_by_sigterm, peak_bytes
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.report import table
from benchmarks.harness.served import call_served

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = ["main", "parse"]

_PLUGINS: Final = Path(__file__).parent / "plugins"
_ARGUMENT_BYTES: Final = (1 << 20) - 64
_CALL_SECONDS: Final = 60
_LEAST_CALLS: Final = 200
_MIB: Final = 1 << 20


def _repeated(unit: str, most: int = 1 << 30) -> str:
    count = min(most, (_ARGUMENT_BYTES - 16) // (len(unit) + 1))
    return f"[[[{','.join([unit] * count)}]],{{}}]"


#: Arguments by kind, as the sandbox would send them; the last ones exceed the decoder's step limit.
_KINDS: Final = {
    "one text of 60 KB": f'[["{"x" * 60_000}"],{{}}]',
    "20,000 empty objects": _repeated("{}", 20_000),
    "records": _repeated('{"name":"x","number":1234,"rate":0.25,"tags":["a","b"]}', 16_000),
    "fractions": _repeated('{"$fraction":[1,3]}', 22_000),
    "one text": f'[["{"x" * (_ARGUMENT_BYTES - 16)}"],{{}}]',
    "numbers": _repeated("0.30000000000000004"),
    "objects of one key": _repeated('{"":1}'),
    "60 arrays in each other": _repeated("[" * 60 + "]" * 60),
}


async def _opened() -> Services:
    from broker_config.settings import Settings
    from nekro.app.services import Services
    from nekro.cli.services.presence import require_workers

    services = Services.load(Settings.load(env_file=None), role="cli")
    await services.start()
    await require_workers(services.read_catalogue)
    return services


async def _call(services: Services, method: str, arguments: Any, chat_key: str) -> None:
    from nekro.app.calls.dispatch import CallScope

    await call_served(
        services,
        await services.find_method(f"bench.weigh.{method}"),
        arguments,
        CallScope(chat=await services.chat(chat_key), user_id=None),
        seconds=_CALL_SECONDS,
    )


async def _attack(kind: str, calls: int, in_flight: int) -> None:
    from nekro_agent.errors import NekroError

    services = await _opened()
    arguments, numbers = _KINDS[kind], iter(range(calls))

    async def one_after_the_other() -> None:
        for _ in numbers:
            with contextlib.suppress(NekroError):  # refused, or too late, after the work was done
                await _call(services, "weigh", arguments, "heavy")

    print("began", flush=True)
    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    await services.close()


async def _small_calls(services: Services, until: subprocess.Popen[str] | None) -> list[float]:
    """Return the seconds of sequential calls, at least 200, made until the process has ended."""
    from nekro.wire.values import encode_arguments

    taken: list[float] = []
    while len(taken) < _LEAST_CALLS or (until is not None and until.poll() is None):
        began = time.perf_counter()
        await _call(services, "pass_back", encode_arguments((len(taken),), {}), "light")
        taken.append(time.perf_counter() - began)
    return taken


async def _measure(worker: Child, options: argparse.Namespace) -> dict[str, list[float]]:
    services = await _opened()
    found: dict[str, list[float]] = {}
    try:
        await _small_calls(services, None)  # fills caches
        found["nothing else"] = await _small_calls(services, None) + await _small_calls(services, None)
        for kind in options.only or _KINDS:
            command = [sys.executable, "-m", "benchmarks.heavy_arguments", "--attack", kind]
            command += ["--calls", str(options.calls), "--in-flight", str(options.in_flight)]
            attack = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert attack.stdout is not None
            await asyncio.to_thread(attack.stdout.readline)
            began = time.perf_counter()
            found[kind] = await _small_calls(services, attack)
            attack.wait()
            seconds, peak = time.perf_counter() - began, peak_bytes([worker.pid]) / _MIB
            p99 = 1e3 * percentile(found[kind], 99)
            words = f"{kind}: p99 {p99:.2f} ms in {seconds:.1f} s, worker {peak:.0f} MiB at most"
            print(words, file=sys.stderr, flush=True)
    finally:
        await services.close()
    return found


def _prepare() -> None:
    from broker_config.settings import Settings
    from storage.migrate import upgrade

    settings = Settings.load(env_file=None)
    asyncio.run(upgrade(settings.database, settings.data_dir))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heavy_arguments", description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="calls of each kind (default: 200)")
    parser.add_argument("--in-flight", type=int, default=8, help="calls in flight at a time (default: 8)")
    parser.add_argument("--only", nargs="*", choices=_KINDS, help="kinds of arguments (default: all)")
    parser.add_argument("--attack", choices=_KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all latencies to FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    interrupted_by_sigterm()
    options = parse(argv)
    if options.attack:
        uvloop.run(_attack(options.attack, options.calls, options.in_flight))
        return 0
    with tempfile.TemporaryDirectory(prefix="nekro-bench-") as name, redis_server(Path(name)) as server:
        os.environ |= {
            "NEKRO_BROKER__URL": server.url,
            "NEKRO_DATA_DIR": str(Path(name) / "data"),
            "NEKRO_PLUGINS__DIRS": str(_PLUGINS),
            "NEKRO_LOG__LEVEL": "ERROR",
        }
        _prepare()
        worker = Child(
            [str(Path(sys.executable).with_name("nekro")), "worker", "--lane", "methods"],
            log=Path(name) / "worker.log",
        )
        try:
            found = uvloop.run(_measure(worker, options))
        finally:
            worker.stop()
        print(describe_machine(server.version), file=sys.stderr)
    rows = []
    least = {percent: percentile(found["nothing else"], percent) for percent in (50, 99)}
    for kind, taken in found.items():
        cells = [kind, str(len(taken))]
        for percent, alone in least.items():
            value = percentile(taken, percent)
            cells += [f"{1e3 * value:.2f}", f"{value / alone:.2f}"]
        rows.append(cells)
    print("\n".join(table(["beside", "calls", "p50 ms", "ratio", "p99 ms", "ratio"], rows)))
    if options.json is not None:
        options.json.write_text(json.dumps(found) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
