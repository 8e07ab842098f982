"""Measure the costs of a sandbox: ``python -m benchmarks.sandbox --help``.

Starts until the first output, cold and forked, with and without packages; CPU time of a run; runs per second;
the round trip of a call between sandboxed code and the bridge; and leftovers of a series of runs on the host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import uvloop

from benchmarks.harness.machine import BUSY_LOAD_PER_CORE, describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from broker_config.settings import SandboxSettings
from nekro.sandbox.drivers.bwrap import BwrapDriver
from nekro.sandbox.drivers.selection import describe
from nekro.sandbox.manager import SandboxManager
from nekro.sandbox.models import Returned, RunRequest, RunResult, StubCall, StubMethod, StubResult
from nekro.sandbox.packages.base import read_base
from nekro_agent.durations import POLL_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import SandboxUnavailableError
from nekro_agent.methods import SandboxMethodType
from storage.files.areas import DataAreas

__all__ = ["Leftovers", "main", "parse"]

_CHAT: Final = "bench"
_CONTAINER: Final = "bench"
_HELLO: Final = "print('hello')"
_PACKAGES: Final = "import numpy, pandas\nprint(numpy.arange(3).sum())"
_FIGURE: Final = (
    "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2])\nplt.savefig('shared/figure.png')"
)
_CALLS: Final = """
import json, time
seconds = []
for _ in range({count}):
    begin = time.perf_counter()
    echo({argument})
    seconds.append(time.perf_counter() - begin)
print(json.dumps(seconds))
"""
_ENDINGS: Final = (_HELLO, "1 / 0", "import os; os.abort()", "echo(1)", "while True: print('x' * 9999)")


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """Number of resources that runs could leave on the host."""

    processes: int
    mounts: int
    groups: int
    descriptors: int
    directories: int

    @classmethod
    def now(cls, directory: Path) -> Leftovers:
        """Count the resources of this process."""
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        groups = [path for path in Path("/sys/fs/cgroup").glob(f"**/nekro-run-{os.getpid()}-*")]
        boxes = Path(tempfile.gettempdir()).glob(f"nekro-box-{os.getpid()}-*")
        return cls(
            processes=len(children),
            mounts=Path("/proc/self/mountinfo").read_text().count("\n"),
            groups=len(groups),
            descriptors=len(os.listdir("/proc/self/fd")),
            directories=sum(1 for _ in directory.rglob("*")) + sum(1 for _ in boxes),
        )


class Bench:
    """One sandbox manager, and measurements with it."""

    def __init__(self, settings: SandboxSettings, directory: Path) -> None:
        self.settings = settings
        self.directory = directory
        self.manager = SandboxManager(settings, DataAreas(directory))

    async def __aenter__(self) -> Bench:
        await self.manager.start()
        driver = self.manager._driver
        if isinstance(driver, BwrapDriver) and driver.forks is not None:
            for server, code in zip(driver.forks, (_PACKAGES, _HELLO), strict=True):
                for _ in range(2):  # the second run starts the fork server
                    await self.run(code)
                async with asyncio.timeout(PROGRAM_SECONDS):
                    while server.is_starting:
                        await asyncio.sleep(POLL_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.manager.close()

    async def run(self, code: str, *, container: str = _CONTAINER) -> tuple[RunResult, float, float]:
        """Run once; returns the result, seconds to the first output and seconds to the end."""
        first: list[float] = []
        begin = time.perf_counter()
        result = await self.manager.run(
            RunRequest(
                run_id=uuid4().hex,
                chat_key=_CHAT,
                container_key=container,
                code=code,
                methods=[_method()],
                dispatch=_echo,
                on_output=lambda text: first.append(time.perf_counter()),
            )
        )
        end = time.perf_counter()
        return result, (first[0] if first else end) - begin, end - begin

    async def starts(self, code: str, *, count: int) -> tuple[list[float], list[float]]:
        """Return the seconds to the first output and to the end of ``count`` runs."""
        firsts, wholes = [], []
        for number in range(count + 2):
            result, first, whole = await self.run(code)
            if result.stop_type != 0:
                raise SandboxUnavailableError(f"the code did not run: {result.output or result.error}")
            if number >= 2:  # the first two warm up caches
                firsts.append(first)
                wholes.append(whole)
        return firsts, wholes

    async def rate(self, *, count: int, at_once: int) -> float:
        """Return how many runs of different chats end per second."""

        async def chat(number: int) -> None:
            for _ in range(count // at_once):
                await self.run(_HELLO, container=f"{_CONTAINER}{number}")

        begin = time.perf_counter()
        await asyncio.gather(*(chat(number) for number in range(at_once)))
        return count // at_once * at_once / (time.perf_counter() - begin)

    async def calls(self, *, count: int, argument: str) -> list[float]:
        """Return the seconds of sequential calls, measured by the code."""
        result, _, _ = await self.run(_CALLS.format(count=count, argument=argument))
        seconds: list[float] = json.loads(result.output)
        return seconds[count // 10 :]

    async def leftovers(self, *, count: int) -> tuple[Leftovers, Leftovers]:
        """Return the resources before and after ``count`` runs with different endings."""
        await self.run(_HELLO)
        before = Leftovers.now(self.directory)
        for number in range(count):
            await self.run(_ENDINGS[number % len(_ENDINGS)])
        return before, Leftovers.now(self.directory)


def _method() -> StubMethod:
    return StubMethod(
        token="echo",
        name="echo",
        path="bench.tools.echo",
        signature="(value)",
        doc=None,
        type=SandboxMethodType.TOOL,
        timeout_seconds=30,
    )


async def _echo(call: StubCall) -> StubResult:
    return Returned(value=b"null")


def _row(name: str, repetitions: Sequence[Sequence[float]], *, scale: float, unit: str) -> str:
    """Return one line: median of the repetitions' medians with their range, 95th percentile of all values."""
    medians = [statistics.median(values) * scale for values in repetitions]
    everything = sorted(value * scale for values in repetitions for value in values)
    p95 = everything[int(len(everything) * 0.95)]
    spread = f"{min(medians):.2f}–{max(medians):.2f}"
    return f"{name:44} {statistics.median(medians):8.2f} {spread:>15} {p95:8.2f}  {unit}"


async def _measure(options: argparse.Namespace) -> int:
    cases = [("plain", _HELLO)]
    if read_base(SandboxSettings()) is not None:
        cases += [("packages", _PACKAGES), ("figure", _FIGURE)]
    for name, code in cases:
        for forks in (False, True):
            kind = "forked" if forks else "cold"
            await _measure_starts(f"{name}, {kind}", code, options, forks=forks)
            cpu = [await _cpu_of_a_run(code, options.runs, forks=forks) for _ in range(options.repetitions)]
            print(
                _row(f"{name}, {kind}: CPU time of all processes", [[c] for c in cpu], scale=1e3, unit="ms")
            )
    return await _measure_rest(options)


async def _measure_starts(name: str, code: str, options: argparse.Namespace, *, forks: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with Bench(SandboxSettings(fork_server=forks), Path(directory)) as bench:
            taken = [await bench.starts(code, count=options.runs) for _ in range(options.repetitions)]
    firsts, wholes = zip(*taken, strict=True)
    if code != _FIGURE:
        print(_row(f"{name}: to the first output", firsts, scale=1e3, unit="ms"))
    print(_row(f"{name}: to the result, all cleaned up", wholes, scale=1e3, unit="ms"))


async def _cpu_of_a_run(code: str, runs: int, *, forks: bool) -> float:
    """Return the CPU seconds that one run takes this process and all others."""
    totals = []
    # The processes of runs count when their parents have ended. Without runs, what a fork server costs.
    for count in (0, runs):
        before = _cpu_seconds()
        with tempfile.TemporaryDirectory() as directory:
            async with Bench(SandboxSettings(fork_server=forks), Path(directory)) as bench:
                for _ in range(count + 1):
                    await bench.run(code)
        totals.append(_cpu_seconds() - before)
    return (totals[1] - totals[0]) / runs


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


async def _measure_rest(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        settings = SandboxSettings(max_calls=options.calls + 1)
        async with Bench(settings, Path(directory)) as bench:
            rates = [
                await bench.rate(count=options.runs, at_once=settings.max_concurrent)
                for _ in range(options.repetitions)
            ]
            print(_row("plain: runs at the same time", [[rate] for rate in rates], scale=1, unit="runs/s"))
            for label, argument in (("64 B", "'x' * 32"), ("16 KiB", "b'x' * 16384")):
                seconds = [
                    await bench.calls(count=options.calls, argument=argument)
                    for _ in range(options.repetitions)
                ]
                print(_row(f"call round trip, {label} argument", seconds, scale=1e6, unit="µs"))
            before, after = await bench.leftovers(count=options.leave_runs)
    print(f"left behind by {options.leave_runs} runs (processes, mounts, groups, descriptors, directories):")
    print(f"  before {before}")
    print(f"  after  {after}")
    return 0 if before == after else 1


async def _describe() -> bool:
    machine = describe_machine("not used")
    print(f"machine: {machine.cores} cores, {machine.cpu}, {machine.kernel}, {machine.python}")
    print(f"load at the start: {machine.load_1m:.2f}", end="")
    busy = machine.load_1m > BUSY_LOAD_PER_CORE * machine.cores
    print("  (busy: take no figure from this run)" if busy else "")
    capability = await describe(SandboxSettings())
    for check in capability.checks:
        print(f"{'ok ' if check.ok else 'NO '} {check.name}: {check.detail} {check.fix}".rstrip())
    return capability.ok


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sandbox",
        description="Measure sandbox starts, call round trips, and leftovers of runs.",
        epilog="exit codes: 0 no leftovers, 1 leftovers, 2 usage, 7 no sandbox here",
    )
    parser.add_argument("--runs", type=int, default=40, help="runs per repetition (40)")
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions of every figure (5)")
    parser.add_argument("--calls", type=int, default=2000, help="calls per repetition (2000)")
    parser.add_argument("--leave-runs", type=int, default=200, help="runs of the leftovers check (200)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    interrupted_by_sigterm()
    options = parse(argv)
    if not uvloop.run(_describe()):
        return 7
    print(f"\n{options.runs} runs x {options.repetitions} repetitions")
    print(f"{'':44} {'median':>8} {'least–greatest':>15} {'p95':>8}")
    return uvloop.run(_measure(options))


if __name__ == "__main__":
    sys.exit(main())
