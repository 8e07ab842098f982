"""Compare sequential calls of several contenders in short turns: ``python -m benchmarks.alternate --help``.

All contenders run at once and take short turns, so that a slow minute of the machine affects all of
them: ratios within a round spread less than those of ``benchmarks.rpc``, whose turns are minutes apart.
Each has a Redis of its own; the processes of the others are idle meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.harness.contender import NotAvailableError, Setup
from benchmarks.harness.figures import percentile
from benchmarks.harness.machine import describe_machine, library_versions
from benchmarks.harness.processes import free_port, interrupted_by_sigterm
from benchmarks.harness.redis_server import redis_server
from benchmarks.harness.report import table
from benchmarks.harness.turn import Conversation, TurnFailedError, opened
from benchmarks.peers import contender_named

__all__ = ["main", "measure", "parse", "ratios_of"]

_DEFAULT: Final = "taskiq,nekro-sandbox"
_LIMIT_SECONDS: Final = 120.0
_WARM_UP: Final = 20


def measure(names: Sequence[str], *, rounds: int, calls: int) -> dict[str, list[list[float]]]:
    """Run the contenders in turns; returns by name, for each round, each call's seconds.

    Raises:
        TurnFailedError: a process of a contender failed.
        NotAvailableError: one is not installed, or cannot run on this machine.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="alternate-bench-")))
        talks = {name: _opened(stack, root / name, name) for name in names}
        for number in range(rounds):
            print(f"round {number + 1}/{rounds} …", file=sys.stderr, flush=True)
            # Alternating order, so that no contender always follows the same other one.
            for name in names if number % 2 == 0 else reversed(names):
                ask = {"do": "sequential", "calls": calls, "warm_up": _WARM_UP}
                found[name].append(talks[name].ask(ask, limit_seconds=_LIMIT_SECONDS)["latencies"])
    return found


def _opened(stack: ExitStack, directory: Path, name: str) -> Conversation:
    contender = contender_named(name)
    missing = contender.missing()
    if missing is not None:
        raise NotAvailableError(f"{name}: {missing}")
    directory.mkdir()
    server = stack.enter_context(redis_server(directory))
    setup = Setup(
        redis_url=server.url, http_port=free_port(), directory=str(directory), workers=1, in_flight=100
    )
    talk = stack.enter_context(opened(contender, setup)).talk
    talk.ask({"do": "sequential", "calls": 100, "warm_up": 100}, limit_seconds=_LIMIT_SECONDS)
    return talk


def ratios_of(found: dict[str, list[list[float]]], *, percent: float) -> dict[str, list[float]]:
    """Return a percentile of each contender's rounds, divided by the first contender's of the same round."""
    first = next(iter(found.values()))
    return {
        name: [
            percentile(own, percent) / percentile(other, percent)
            for own, other in zip(rounds, first, strict=True)
        ]
        for name, rounds in found.items()
    }


def as_text(found: dict[str, list[list[float]]]) -> str:
    """Render the table."""
    rows = []
    by_percent = {percent: ratios_of(found, percent=percent) for percent in (50, 99)}
    for name, rounds in found.items():
        cells = [name]
        for percent, ratios in by_percent.items():
            low, _, high = quantiles(ratios[name], n=4)
            milliseconds = 1e3 * median(percentile(one, percent) for one in rounds)
            cells += [f"{milliseconds:.3f}", f"{median(ratios[name]):.2f} ({low:.2f}–{high:.2f})"]
        rows.append(cells)
    first = next(iter(found))
    head = ["", "p50 ms", f"/ {first}'s", "p99 ms", f"/ {first}'s"]
    return "\n".join(table(head, rows))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends the process with code 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alternate",
        description=__doc__,
        epilog="exit codes: 0 done, 1 a contender failed or is not available, 2 usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", metavar="NAMES", default=_DEFAULT, help=f"the first is the reference ({_DEFAULT})"
    )
    parser.add_argument("--rounds", type=int, default=12, metavar="N", help="turns of each, at least 2 (12)")
    parser.add_argument("--calls", type=int, default=250, metavar="N", help="calls per turn (250)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    words = parser.parse_args(argv)
    words.only = words.only.split(",")
    try:
        for name in words.only:
            contender_named(name)
    except LookupError as exc:
        parser.error(str(exc.args[0]))
    if words.rounds < 2 or words.calls < 1:
        parser.error(f"at least 2 rounds of 1 call, not {words.rounds} of {words.calls}")
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a contender failed."""
    interrupted_by_sigterm()
    options = parse(argv)
    machine = describe_machine("")
    try:
        found = measure(options.only, rounds=options.rounds, calls=options.calls)
    except (TurnFailedError, NotAvailableError) as exc:
        print(exc, file=sys.stderr)
        return 1
    print(as_text(found))
    print("\nMedians of the rounds; ratios within a round, median (quartiles).")
    print(
        f"{options.rounds} rounds of {options.calls} calls; {machine.cores} cores ({machine.cpu}), "
        f"{machine.kernel}, {machine.python}, load {machine.load_1m:.2f} at the start"
    )
    if options.json is not None:
        figures: dict[str, Any] = {
            "p50_ratios": ratios_of(found, percent=50),
            "p99_ratios": ratios_of(found, percent=99),
            "seconds": found,
            "versions": library_versions(),
        }
        options.json.write_text(json.dumps(figures) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
