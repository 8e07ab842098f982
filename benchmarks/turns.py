"""Measure whole turns beside other agent systems: ``python -m benchmarks.turns``.

A person's message comes in over HTTP, a scripted model answers with code, the code makes three calls, the
third brings a result to the model, and the model's words go out as the answer. Systems take turns (A B C …
A B C …), each with fresh processes, the same model and the same answers, which are checked. Messages come one
after the other, then from several chats at once, then once more to watch the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import uvloop

from benchmarks.agents.script import TurnModel, answer_to, new_mark, question_of
from benchmarks.agents.systems import SYSTEMS, Running, System, system_named
from benchmarks.harness.contender import NotAvailableError
from benchmarks.harness.figures import Spread, percentile, spread
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.report import table
from benchmarks.harness.usage import tree_cpu_seconds, tree_pss_bytes, tree_rss_bytes

__all__ = ["Figures", "Person", "main", "parse"]

#: Turns of a chat, whose history grows with each, before the next chat begins.
_TURNS_OF_CHAT: Final = 5
_REQUEST_SECONDS: Final = 90.0
_SAMPLE_SECONDS: Final = 0.2
_MEBIBYTE: Final = float(1 << 20)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured of a system in a repetition."""

    #: One after the other.
    alone: int
    #: Of each chat, with ``chats`` at once.
    loaded: int
    chats: int
    #: Without turns.
    idle_seconds: float = 10.0

    def part(self, share: float) -> Plan:
        """Return a plan with fewer turns."""
        return replace(
            self, alone=max(3, round(self.alone * share)), loaded=max(2, round(self.loaded * share))
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one repetition measured of a system."""

    #: From the message to the answer, one after the other.
    alone_p50_seconds: float
    alone_p99_seconds: float
    #: With several chats at once.
    loaded_p50_seconds: float
    loaded_p99_seconds: float
    turns_per_second: float
    #: Processor time of all processes of the system for each second without turns.
    idle_cpu_share: float
    #: Beyond that, for each turn with several chats at once.
    cpu_seconds_per_turn: float
    #: The same by process, with all below it.
    cpu_seconds_by_process: dict[str, float]
    #: Without turns, and the most with several at once; proportional memory.
    idle_bytes: int
    peak_bytes: int
    #: The most with several at once, where shared pages count for each process.
    resident_peak_bytes: int
    model_requests_per_turn: float


@dataclass(kw_only=True)
class Result:
    """The repetitions of one system."""

    system: System
    turns: list[Figures | None] = field(default_factory=list)
    #: Why it was not measured; None when it was.
    absent: str | None = None

    def spread(self, name: str) -> Spread | None:
        """Return the spread of a figure; None without any."""
        return spread(getattr(turn, name) for turn in self.turns if turn is not None)


#: Field, heading, factor to its unit, digits.
_COLUMNS: Final = (
    ("alone_p50_seconds", "alone p50 ms", 1e3, 1),
    ("alone_p99_seconds", "p99 ms", 1e3, 1),
    ("turns_per_second", "turns/s", 1, 1),
    ("loaded_p50_seconds", "loaded p50 ms", 1e3, 0),
    ("loaded_p99_seconds", "p99 ms", 1e3, 0),
    ("cpu_seconds_per_turn", "CPU ms/turn", 1e3, 1),
    ("idle_cpu_share", "idle CPU %", 100, 1),
    ("idle_bytes", "idle MiB", 1 / _MEBIBYTE, 0),
    ("peak_bytes", "peak MiB", 1 / _MEBIBYTE, 0),
)


class Person:
    """Posts messages to a system and checks its answers."""

    def __init__(self, http: httpx.AsyncClient, system: Running) -> None:
        self._http = http
        self._system = system

    async def _turn(self, chat: str) -> float:
        mark = new_mark()
        path, body = self._system.request(chat, question_of(mark))
        began = time.perf_counter()
        try:
            answer = await self._http.post(path, json=body)
        except httpx.TransportError as exc:
            raise NotAvailableError(f"it gave no answer: {exc!r}") from exc
        taken = time.perf_counter() - began
        if not answer.is_success or answer_to(mark) not in answer.text:
            raise NotAvailableError(f"it answered with {answer.status_code}: {answer.text[-600:]}")
        return taken

    async def turns(self, count: int, *, chats: int) -> list[float]:
        """Take ``count`` turns in each of ``chats`` chats at once; returns their seconds."""

        async def chat() -> list[float]:
            taken = []
            for number in range(count):
                if number % _TURNS_OF_CHAT == 0:
                    key = f"chat-{new_mark()}"
                taken.append(await self._turn(key))
            return taken

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chat()) for _ in range(chats)]
        return [seconds for task in tasks for seconds in task.result()]


def _spent(system: Running) -> dict[str, float]:
    return {name: tree_cpu_seconds(pids) for name, pids in system.processes().items()}


def _pids(system: Running) -> list[int]:
    return [pid for pids in system.processes().values() for pid in pids]


def _per_second(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    return {name: (cpu - before.get(name, 0.0)) / seconds for name, cpu in after.items()}


async def _peaks(system: Running, load: asyncio.Task[Any]) -> tuple[int, int]:
    """Return the most proportional and resident memory until a load ends."""
    most = resident = 0
    while not load.done():
        pids = _pids(system)
        most, resident = max(most, tree_pss_bytes(pids)), max(resident, tree_rss_bytes(pids))
        await asyncio.wait({load}, timeout=_SAMPLE_SECONDS)
    return most, resident


async def _measure(system: Running, model: TurnModel, plan: Plan) -> Figures:
    # Servers close connections that are idle for 5 s, maybe just when the next request is sent.
    limits = httpx.Limits(max_connections=plan.chats + 1, keepalive_expiry=2)
    async with httpx.AsyncClient(
        base_url=system.url, headers=system.headers, limits=limits, timeout=_REQUEST_SECONDS
    ) as http:
        person = Person(http, system)
        await person.turns(max(2, plan.alone // 10), chats=1)
        await person.turns(max(1, plan.loaded // 5), chats=plan.chats)
        idle = tree_pss_bytes(_pids(system))
        before = _spent(system)
        await asyncio.sleep(plan.idle_seconds)
        resting = _per_second(before, _spent(system), plan.idle_seconds)
        alone = await person.turns(plan.alone, chats=1)
        requests, before, began = model.requests, _spent(system), time.perf_counter()
        loaded = await person.turns(plan.loaded, chats=plan.chats)
        seconds = time.perf_counter() - began
        requests = model.requests - requests
        rates = _per_second(before, _spent(system), seconds)
        spent = {
            name: (rate - resting.get(name, 0.0)) * seconds / len(loaded) for name, rate in rates.items()
        }
        async with asyncio.TaskGroup() as group:
            load = group.create_task(person.turns(max(2, plan.loaded // 2), chats=plan.chats))
            peak, resident = await _peaks(system, load)
    return Figures(
        alone_p50_seconds=percentile(alone, 50),
        alone_p99_seconds=percentile(alone, 99),
        loaded_p50_seconds=percentile(loaded, 50),
        loaded_p99_seconds=percentile(loaded, 99),
        turns_per_second=len(loaded) / seconds,
        idle_cpu_share=sum(resting.values()),
        cpu_seconds_per_turn=sum(spent.values()),
        cpu_seconds_by_process=spent,
        idle_bytes=idle,
        peak_bytes=peak,
        resident_peak_bytes=resident,
        model_requests_per_turn=requests / len(loaded),
    )


async def _served(system: System, directory: Path, plan: Plan) -> Figures:
    """Start a system and measure it.

    The model serves meanwhile: what starts the system blocks, so it runs on a thread.
    """
    model = TurnModel()
    try:
        started = system.start(directory, await model.start())
        running = await asyncio.to_thread(started.__enter__)
        try:
            return await _measure(running, model, plan)
        finally:
            await asyncio.to_thread(started.__exit__, None, None, None)
    finally:
        model.stop()


def _take_turn(result: Result, plan: Plan) -> None:
    with tempfile.TemporaryDirectory(prefix="nekro-turns-", ignore_cleanup_errors=True) as directory:
        try:
            result.turns.append(
                uvloop.run(_served(result.system, Path(directory), plan.part(result.system.share)))
            )
        except* NotAvailableError as found:
            error: BaseException = found
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            result.absent = str(error)
            result.turns.append(None)


def _cell(found: Spread | None, factor: float, digits: int) -> str:
    if found is None:
        return "-"
    median, low, high = (f"{part * factor:.{digits}f}" for part in (found.median, found.low, found.high))
    return f"{median} ({low}–{high})"


def _split(result: Result) -> str:
    """Return the processor time of each process as text: the median of the repetitions."""
    splits = [turn.cpu_seconds_by_process for turn in result.turns if turn is not None]
    named = [name for name in splits[0] if all(name in split for split in splits)]
    return ", ".join(f"{name} {median(split[name] for split in splits) * 1e3:.1f}" for name in named)


def as_text(results: Sequence[Result], plan: Plan) -> str:
    """Render the report."""
    head = ["median (least–greatest)", *(title for _, title, _, _ in _COLUMNS)]
    rows = [
        [
            result.system.name,
            *(_cell(result.spread(name), factor, digits) for name, _, factor, digits in _COLUMNS),
        ]
        for result in results
        if any(result.turns)
    ]
    lines = [*table(head, rows), ""]
    for result in results:
        if result.absent is not None:
            lines.append(f"{result.system.name}: not measured: {result.absent}")
        if not any(result.turns):
            continue
        lines.append(f"{result.system.name}: {result.system.about}")
        lines.append(f"  CPU ms/turn: {_split(result)}")
        lines += [f"  lacks: {result.system.lacks}"] if result.system.lacks else []
    lines += [
        "",
        f"alone: {plan.alone} turns one after the other; loaded: {plan.loaded} turns in each of {plan.chats}"
        f" chats at once, each with its turns one after the other; new chats after {_TURNS_OF_CHAT} turns;"
        " smolagents-docker, which makes a container for each chat: a fifth of these turns",
    ]
    return "\n".join(lines)


def as_data(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of every repetition as JSON types."""
    return {
        result.system.name: {
            "absent": result.absent,
            "repetitions": [None if turn is None else asdict(turn) for turn in result.turns],
        }
        for result in results
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    names = ", ".join(system.name for system in SYSTEMS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.turns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"systems: {names}\n\nexit codes: 0 measured, 1 none was, 2 usage",
    )
    parser.add_argument("--only", metavar="NAMES", help="comma-separated systems; see the names below")
    parser.add_argument("--repetitions", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--alone", type=int, default=60, help="turns one after the other (default: 60)")
    parser.add_argument("--chats", type=int, default=8, help="chats at once (default: 8)")
    parser.add_argument("--loaded", type=int, default=15, help="turns of each of them (default: 15)")
    parser.add_argument("--quick", action="store_true", help="one short repetition, to check that all works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(argv)
    try:
        options.systems = tuple(map(system_named, options.only.split(","))) if options.only else SYSTEMS
    except LookupError as exc:
        parser.error(str(exc.args[0]))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    interrupted_by_sigterm()
    options = parse(argv)
    plan = Plan(alone=options.alone, loaded=options.loaded, chats=options.chats)
    repetitions = options.repetitions
    if options.quick:
        plan, repetitions = Plan(alone=3, loaded=2, chats=2, idle_seconds=1), 1
    with tempfile.TemporaryDirectory() as name, redis_server(Path(name)) as server:
        machine = describe_machine(server.version)
    results = [Result(system=system) for system in options.systems]
    for number in range(repetitions):
        for result in results:
            if result.absent is None:
                print(f"{number + 1}/{repetitions} {result.system.name} …", file=sys.stderr, flush=True)
                _take_turn(result, plan)
    print(as_text(results, plan))
    print(", ".join(f"{name} {value}" for name, value in asdict(machine).items()))
    words = sys.argv[1:] if argv is None else argv
    print(f"command: {shlex.join(['python', '-m', 'benchmarks.turns', *words])}")
    if options.json is not None:
        options.json.write_text(json.dumps(as_data(results)) + "\n", "utf-8")
    return 1 if all(result.absent is not None for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
