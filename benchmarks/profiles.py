"""Record flame graphs of a call, a round, a turn, a run of code, a command and a worker's start.

``python -m benchmarks.profiles`` starts the parts with a Redis and data of their own, lets py-spy sample
their processes, and writes an SVG for each process. Open one in a browser: the width of a box is its share of
the processor time. For each, it prints the functions of the product that cost most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import httpx

from benchmarks import follow_up
from benchmarks.agents.script import TurnModel
from benchmarks.agents.systems import system_named
from benchmarks.harness.contender import ROOT, NotAvailableError, Setup
from benchmarks.harness.flames import Recorder, costs
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import descendants, free_port, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.report import table
from benchmarks.harness.turn import Opened, TurnFailedError, opened
from benchmarks.peers import ours
from benchmarks.turns import Person

__all__ = ["SUBJECTS", "main", "parse"]

_FOLDER: Final = ROOT / "artifacts" / "profiles"
_METHOD: Final = "bench.probe.probe"
_RUN_SECONDS: Final = 120
#: Calls of one run of code: enough that its start costs little beside them.
_CALLS: Final = 2000
#: That take turns at once.
_CHATS: Final = 4
#: Runs a command many times, as one alone takes too few samples.
_REPEAT: Final = (
    "import subprocess, sys\nfor _ in range(int(sys.argv[1])): subprocess.run(sys.argv[2:], check=True)"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the flame graphs go, and how long is recorded."""

    folder: Path
    seconds: int
    rate: int
    redis_url: str
    #: Of the processes.
    directory: Path

    def recorder(self, name: str) -> Recorder:
        """Return a recorder for one process."""
        return Recorder(self.folder / f"{name}.svg", rate=self.rate)


@contextmanager
def _recorded(plan: Plan, processes: Mapping[str, int]) -> Iterator[Callable[[], bool]]:
    """Record processes; yields what says whether the load must go on."""
    recorders = []
    try:
        for name, pid in processes.items():
            recorder = plan.recorder(name)
            recorder.attach(pid, seconds=plan.seconds)
            recorders.append(recorder)
        yield lambda: any(recorder.is_recording for recorder in recorders)
    finally:
        for recorder in recorders:
            recorder.finish()


@contextmanager
def _system(plan: Plan) -> Iterator[tuple[Setup, Opened]]:
    """Run a methods worker, and a process with what a rounds worker has to run code."""
    with opened(ours.SANDBOX, setup := _setup(plan)) as system:
        yield setup, system


def _setup(plan: Plan) -> Setup:
    return Setup(
        redis_url=plan.redis_url,
        http_port=free_port(),
        directory=str(plan.directory),
        workers=1,
        in_flight=1,
    )


def _sequential(system: Opened, calls: int) -> None:
    system.talk.ask({"do": "sequential", "calls": calls, "warm_up": 0}, limit_seconds=_RUN_SECONDS)


def _call(plan: Plan) -> None:
    with _system(plan) as (_, system):
        _sequential(system, 100)
        processes = {"call-caller": system.client.pid, "call-worker": system.workers[0].pid}
        with _recorded(plan, processes) as goes_on:
            while goes_on():
                _sequential(system, _CALLS)


def _run(plan: Plan) -> None:
    with _system(plan) as (_, system):
        _sequential(system, 1)
        with _recorded(plan, {"run": system.client.pid}) as goes_on:
            while goes_on():
                _sequential(system, 1)


def _round(plan: Plan) -> None:
    async def rounds() -> None:
        async with follow_up.running(plan.directory, plan.redis_url) as system:
            await system.turn()
            processes = {f"round-{lane}": worker.pid for lane, worker in system.workers.items()}
            with _recorded(plan, processes) as goes_on:
                while goes_on():
                    await system.turn()

    asyncio.run(rounds())


def _turn(plan: Plan) -> None:
    async def turns() -> None:
        model = TurnModel()
        try:
            started = system_named("nekro-sqlite").start(plan.directory, await model.start())
            with ExitStack() as stack:
                system = await asyncio.to_thread(stack.enter_context, started)
                async with httpx.AsyncClient(
                    base_url=system.url, headers=system.headers, timeout=_RUN_SECONDS
                ) as http:
                    person = Person(http, system)
                    await person.turns(2, chats=_CHATS)
                    processes = {
                        f"turn-{name}": pid for name, (pid,) in system.processes().items() if name != "redis"
                    }
                    with _recorded(plan, processes) as goes_on:
                        while goes_on():
                            await person.turns(5, chats=_CHATS)
        finally:
            model.stop()

    asyncio.run(turns())


def _command(plan: Plan) -> None:
    with _system(plan) as (setup, _):
        recorder = plan.recorder("command")
        nekro = str(Path(sys.executable).with_name("nekro"))
        call = [nekro, "call", _METHOD, "--args", '[1, "text"]']
        repeated = [sys.executable, "-c", _REPEAT, str(max(1, plan.seconds)), *call]
        _spawned(
            recorder.command("--subprocesses", "--", *repeated),
            {**setup.environment(), **ours.SANDBOX.environment(setup)},
            plan.directory,
        )


def _start(plan: Plan) -> None:
    recorder = plan.recorder("start")

    def commands(setup: Setup) -> list[list[str]]:
        return [recorder.command("--", *command) for command in ours.SANDBOX.worker_commands(setup)]

    with opened(replace(ours.SANDBOX, worker_commands=commands), _setup(plan)) as system:
        spy = system.workers[0]
        # py-spy writes when the worker has ended.
        for pid in descendants(spy.pid):
            os.kill(pid, signal.SIGTERM)
        spy.process.wait(_RUN_SECONDS)


def _spawned(command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise NotAvailableError(f"{done.stdout}{done.stderr}".strip())


#: What can be recorded.
SUBJECTS: Final[dict[str, Callable[[Plan], None]]] = {
    "call": _call,
    "round": _round,
    "turn": _turn,
    "run": _run,
    "command": _command,
    "start": _start,
}


def _show(path: Path, most: int) -> None:
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    rows = [
        [f"{cost.function} ({cost.place})", f"{cost.own:.1%}", f"{cost.total:.1%}"]
        for cost in costs(path)[:most]
    ]
    print(f"\n{shown}")
    print("\n".join(table(["function", "own", "with callees"], rows)))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profiles",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 all were recorded, 1 one was not, 2 usage",
    )
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated, of: {', '.join(SUBJECTS)}")
    parser.add_argument("--seconds", type=int, default=15, help="of each recording (default: 15)")
    parser.add_argument("--rate", type=int, default=250, help="samples per second (default: 250)")
    parser.add_argument("--functions", type=int, default=10, metavar="N", help="shown of each (default: 10)")
    parser.add_argument(
        "--folder", type=Path, default=_FOLDER, help="of the SVG files (default: artifacts/profiles)"
    )
    options = parser.parse_args(argv)
    options.only = options.only.split(",") if options.only else list(SUBJECTS)
    for name in options.only:
        if name not in SUBJECTS:
            parser.error(f"there is no {name!r}; there are {', '.join(SUBJECTS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Record and print; 1 if something could not be recorded."""
    interrupted_by_sigterm()
    options = parse(argv)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in options.only:
        print(f"{name} …", file=sys.stderr, flush=True)
        for old in folder.glob(f"{name}*.svg"):
            old.unlink()
        with tempfile.TemporaryDirectory(prefix="nekro-bench-") as place, redis_server(Path(place)) as server:
            directory = Path(place) / "turn"
            directory.mkdir()
            plan = Plan(
                folder=folder,
                seconds=options.seconds,
                rate=options.rate,
                redis_url=server.url,
                directory=directory,
            )
            try:
                SUBJECTS[name](plan)
            except (NotAvailableError, TurnFailedError) as exc:
                print(f"{name} was not recorded: {exc}", file=sys.stderr)
                failures += 1
                continue
            machine = describe_machine(server.version)
        for path in sorted(folder.glob(f"{name}*.svg")):
            _show(path, options.functions)
    if failures < len(options.only):
        print(f"\n{machine}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
