"""Compare a method call with other task queues: ``python -m benchmarks.rpc --help``.

All contenders run at once, each on a Redis of its own, and take short turns; the processes of the others are
idle meanwhile. A slow minute of the machine therefore affects all of them, and no call is measured while a
process still starts. ``docs/performance.md`` explains the report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.harness.contender import Contender, NotAvailableError, Setup
from benchmarks.harness.figures import Figures
from benchmarks.harness.machine import describe_machine, library_versions
from benchmarks.harness.processes import free_port, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server, redis_version
from benchmarks.harness.report import Result, Run, as_data, as_text
from benchmarks.harness.turn import Opened, Plan, TurnFailedError, figures_of, flood, opened, sequential
from benchmarks.peers import CONTENDERS, contender_named

__all__ = ["Options", "main", "parse_options", "run_benchmark"]

_EPILOG = """\
examples:
  make bench                                          the whole table
  python -m benchmarks.rpc --quick                    two short turns, to check that all of it works
  python -m benchmarks.rpc --only taskiq,nekro-bridge --turns 20
  python -m benchmarks.rpc --workers 2 --json bench.json

exit codes: 0 every installed contender was measured, 1 one failed, 2 usage, 130 interrupted
"""
_INTERRUPTED = 130

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parsed command line."""

    contenders: tuple[Contender, ...]
    turns: int
    plan: Plan
    json_path: Path | None
    command: str


def parse_options(argv: Sequence[str]) -> Options:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rpc",
        description="Measure a call's round trip and calls per second, in comparison with other task queues.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two turns with a tenth of the calls")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated contenders; see the names below")
    parser.add_argument("--turns", type=_positive, metavar="N", help="turns of each contender (12)")
    parser.add_argument("--calls", type=_positive, metavar="N", help="sequential calls per turn (250)")
    parser.add_argument("--flood-calls", type=_positive, metavar="N", help="concurrent calls per turn (2000)")
    parser.add_argument("--in-flight", type=_positive, default=100, metavar="N", help="concurrency (100)")
    parser.add_argument("--workers", type=_positive, default=1, metavar="N", help="worker processes (1)")
    parser.add_argument(
        "--limit", type=float, default=120, metavar="SECONDS", help="longest measurement (120)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    names = ", ".join(contender.name for contender in CONTENDERS)
    parser.epilog = f"contenders: {names}\n\n{_EPILOG}"
    words = parser.parse_args(argv)
    try:
        contenders = tuple(map(contender_named, words.only.split(","))) if words.only else CONTENDERS
    except LookupError as exc:
        parser.error(str(exc.args[0]))
    plan = Plan(
        sequential_calls=words.calls or (25 if words.quick else 250),
        flood_calls=words.flood_calls or (200 if words.quick else 2000),
        in_flight=words.in_flight,
        workers=words.workers,
        limit_seconds=words.limit,
    )
    return Options(
        contenders=contenders,
        turns=words.turns or (2 if words.quick else 12),
        plan=plan,
        json_path=words.json,
        command=shlex.join(["python", "-m", "benchmarks.rpc", *argv]),
    )


def run_benchmark(options: Options, directory: Path) -> Run:
    """Run every turn, with files below ``directory`` and progress on stderr."""
    results = [Result(contender=contender, absent=contender.missing()) for contender in options.contenders]
    machine = describe_machine(redis_version())
    with ExitStack() as stack:
        running = {}
        for number, result in enumerate(results):
            if result.absent is not None:
                continue
            _progress(f"{result.contender.name} starts")
            found = _guarded(result, _open, stack, result.contender, options.plan, directory)
            if found is not None:
                running[number] = found
        for turn in range(options.turns):
            _progress(f"turn {turn + 1}/{options.turns}")
            # Alternating order, so that no contender always follows the same other one.
            _take_turns(results, running if turn % 2 == 0 else dict(reversed(running.items())), options.plan)
    return Run(
        results=results,
        plan=options.plan,
        machine=machine,
        versions=library_versions(),
        command=options.command,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the report goes to stdout, progress to stderr."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    interrupted_by_sigterm()
    try:
        with tempfile.TemporaryDirectory(prefix="rpc-bench-") as directory:
            run = run_benchmark(options, Path(directory))
    except KeyboardInterrupt:
        print("interrupted; all started processes have been stopped", file=sys.stderr)
        return _INTERRUPTED
    print(as_text(run))
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(as_data(run), indent=2) + "\n", "utf-8")
    return 1 if any(result.failures for result in run.results) else 0


def _open(stack: ExitStack, contender: Contender, plan: Plan, directory: Path) -> Opened:
    own = directory / contender.name
    own.mkdir()
    setup = Setup(
        redis_url=stack.enter_context(redis_server(own)).url,
        http_port=free_port(),
        directory=str(own),
        workers=plan.workers,
        in_flight=plan.in_flight,
    )
    return stack.enter_context(opened(contender, setup))


def _take_turns(results: list[Result], running: dict[int, Opened], plan: Plan) -> None:
    """Let each contender make its sequential calls, and after those of all its concurrent ones.

    So nothing that concurrent calls leave behind delays the sequential calls of the next contender.
    """
    latencies = {
        number: _guarded(results[number], sequential, each, plan) for number, each in running.items()
    }
    figures: dict[int, Figures | None] = {}
    for number, each in running.items():
        seconds, result = latencies[number], results[number]
        rate = None if seconds is None else _guarded(result, flood, each, plan)
        if seconds is not None and rate is not None:
            figures[number] = _guarded(result, figures_of, each, seconds, rate)
    for number, result in enumerate(results):
        result.turns.append(figures.get(number))


def _guarded(result: Result, do: Callable[P, T], *args: P.args, **named: P.kwargs) -> T | None:
    """Do a part of a contender's measurement; None after a failure, which the report names.

    A contender that has failed is not measured again.
    """
    if result.failures:
        return None
    try:
        return do(*args, **named)
    except NotAvailableError as exc:
        result.absent = f"not available: {exc}"
    except TurnFailedError as exc:
        result.failures.append(str(exc))
    return None


def _progress(words: str) -> None:
    print(f"{words} …", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
