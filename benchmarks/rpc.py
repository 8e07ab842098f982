"""Compare a method call with other task queues on one Redis: ``python -m benchmarks.rpc --help``.

Contenders take turns (A B C … A B C …), each turn with fresh worker and client processes, so that
variations of the machine affect all of them. ``docs/performance.md`` explains the report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.contender import Contender, NotAvailableError, Setup
from benchmarks.harness.machine import describe_machine, library_versions
from benchmarks.harness.processes import free_port, interrupted_by_sigterm
from benchmarks.harness.redis_server import RedisServer, redis_server
from benchmarks.harness.report import Result, Run, as_data, as_text
from benchmarks.harness.turn import Plan, TurnFailedError, take_turn
from benchmarks.peers import CONTENDERS, contender_named

__all__ = ["Options", "main", "parse_options", "run_benchmark"]

_EPILOG = """\
examples:
  make bench                                          the whole table
  python -m benchmarks.rpc --quick                    one short repetition, to check that all of it works
  python -m benchmarks.rpc --only taskiq,nekro-bridge --repetitions 9
  python -m benchmarks.rpc --workers 2 --json bench.json

exit codes: 0 every installed contender was measured, 1 one failed, 2 usage, 130 interrupted
"""
_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """The parsed command line."""

    contenders: tuple[Contender, ...]
    repetitions: int
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
    parser.add_argument("--quick", action="store_true", help="one repetition with a tenth of the calls")
    parser.add_argument("--only", metavar="NAMES", help="comma-separated contenders; see the names below")
    parser.add_argument("--repetitions", type=_positive, metavar="N", help="turns of each contender (5)")
    parser.add_argument("--calls", type=_positive, metavar="N", help="sequential calls per turn (2000)")
    parser.add_argument(
        "--flood-calls", type=_positive, metavar="N", help="concurrent calls per turn (10000)"
    )
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
        sequential_calls=words.calls or (200 if words.quick else 2000),
        flood_calls=words.flood_calls or (1000 if words.quick else 10_000),
        in_flight=words.in_flight,
        workers=words.workers,
        limit_seconds=words.limit,
    )
    return Options(
        contenders=contenders,
        repetitions=words.repetitions or (1 if words.quick else 5),
        plan=plan,
        json_path=words.json,
        command=shlex.join(["python", "-m", "benchmarks.rpc", *argv]),
    )


def run_benchmark(options: Options, directory: Path) -> Run:
    """Run every repetition on one Redis, with files below ``directory`` and progress on stderr."""
    results = [Result(contender=contender, absent=contender.missing()) for contender in options.contenders]
    with redis_server(directory) as server:
        machine = describe_machine(server.version)
        for repetition in range(options.repetitions):
            for result in results:
                if result.absent is not None:
                    result.turns.append(None)
                    continue
                name = result.contender.name
                print(f"{repetition + 1}/{options.repetitions} {name} …", file=sys.stderr, flush=True)
                _take_turn(result, server, options.plan, directory / f"{repetition}-{name}")
    return Run(
        results=results,
        plan=options.plan,
        repetitions=options.repetitions,
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


def _take_turn(result: Result, server: RedisServer, plan: Plan, directory: Path) -> None:
    directory.mkdir()
    server.clear()
    setup = Setup(
        redis_url=server.url,
        http_port=free_port(),
        directory=str(directory),
        workers=plan.workers,
        in_flight=plan.in_flight,
    )
    try:
        result.turns.append(take_turn(result.contender, setup, plan))
    except NotAvailableError as exc:
        result.absent = f"not available: {exc}"
        result.turns.append(None)
    except TurnFailedError as exc:
        result.failures.append(str(exc))
        result.turns.append(None)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
