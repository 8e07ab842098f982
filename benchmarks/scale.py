"""Measure how calls scale here and simulate larger fleets: ``python -m benchmarks.scale --help``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import Machine, describe_machine
from benchmarks.harness.processes import interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.scaling.measure import Costs, Figures, Plan, Throughput, Waiting, measure
from benchmarks.scaling.page import Taken, as_markdown, write_between_marks
from benchmarks.scaling.streams import StreamCosts
from benchmarks.scaling.turns import Spent, Turns

__all__ = ["main"]

_EPILOG = """\
examples:
  make scale                                       measure, simulate, print
  make scale SCALE_ARGS='--write docs/scaling.md'  and write the result into the page
  python -m benchmarks.scale --quick               half a minute, to check that all of it works
  python -m benchmarks.scale --json scale.json     save the measurements
  python -m benchmarks.scale --from scale.json     simulate again from saved measurements

exit codes: 0 done, 2 usage, 130 interrupted
"""
_INTERRUPTED = 130
_SIMULATED_CALLS = 20_000
_SIMULATED_QUICKLY = 1_000


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="Measure calls per second and latency on this machine, and simulate larger fleets.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="short measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements to FILE")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="measure nothing; read FILE")
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the figures between the marks of PAGE"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the report goes to stdout, progress to stderr."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = parse(given)
    interrupted_by_sigterm()
    try:
        taken = _kept(options.source) if options.source is not None else _measured(options, given)
    except KeyboardInterrupt:
        print("interrupted; all started processes have been stopped", file=sys.stderr)
        return _INTERRUPTED
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(taken), indent=2) + "\n", "utf-8")
    text = as_markdown(taken, calls=_SIMULATED_QUICKLY if options.quick else _SIMULATED_CALLS)
    print(text)
    if options.write is not None:
        write_between_marks(options.write, text)
    return 0


def _measured(options: argparse.Namespace, given: Sequence[str]) -> Taken:
    with tempfile.TemporaryDirectory(prefix="scale-") as directory, redis_server(Path(directory)) as server:
        machine = describe_machine(server.version)  # before the measurements load it
        return Taken(
            figures=measure(server, Path(directory), Plan.quick() if options.quick else Plan()),
            machine=machine,
            command=shlex.join(["python", "-m", "benchmarks.scale", *given]),
            date=datetime.now(UTC).date().isoformat(),
        )


def _kept(source: Path) -> Taken:
    kept = json.loads(source.read_text("utf-8"))
    figures = kept["figures"]
    return Taken(
        figures=Figures(
            throughput=tuple(Throughput(**one) for one in figures["throughput"]),
            waiting=tuple(Waiting(**one) for one in figures["waiting"]),
            costs=Costs(**figures["costs"]),
            turns=_kept_turns(figures["turns"]),
            streams=StreamCosts(**figures["streams"]),
        ),
        machine=Machine(**kept["machine"]),
        command=kept["command"],
        date=kept["date"],
    )


def _kept_turns(kept: dict[str, Any] | None) -> Turns | None:
    if kept is None:
        return None
    spent = {
        "fit": tuple(Spent(**one) for one in kept["fit"]),
        "check": None if kept["check"] is None else Spent(**kept["check"]),
        "idle": Spent(**kept["idle"]),
    }
    return Turns(**{**kept, **spent})


if __name__ == "__main__":
    sys.exit(main())
