"""The command line of the harness."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fault_plan import DATABASES, CallKind, FaultKind, Options

ABOUT = "Load a real fleet, break its parts, and check the promises of docs/reliability.md from outside."


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=ABOUT)
    parser.add_argument("--seed", type=int, help="decides the calls and the faults; default: a random one")
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    parser.add_argument("--seconds", type=float, default=30, help="how long to call and to break things")
    parser.add_argument("--faults", type=_faults, default="all", help=f"all, none, or of {_NAMES}")
    parser.add_argument(
        "--lanes", type=_words, default=Options.lanes, help="one worker for each, comma-separated"
    )
    parser.add_argument("--callers", type=int, default=2, help="processes that call")
    parser.add_argument("--at-once", type=int, default=20, help="calls under way in each of them")
    parser.add_argument("--calls", type=int, default=0, help="calls in total; 0: as many as fit in --seconds")
    parser.add_argument("--cancels", type=float, default=0.1, help="share of calls that are given up")
    parser.add_argument(
        "--methods", type=_methods, default=(), help=f"make only calls of these, of {_METHODS}; default: all"
    )
    parser.add_argument("--server", action="store_true", help="also call tools of an MCP server")
    parser.add_argument("--redis", type=Path, help="a redis-server instead of the one in the wheel")
    parser.add_argument("--keep", type=Path, help="write logs here; default: kept only after a violation")
    return parser.parse_args(words)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


_NAMES = ",".join(FaultKind)
_METHODS = ",".join(CallKind)


def _methods(text: str) -> tuple[str, ...]:
    if unknown := sorted(set(text.split(",")) - set(CallKind)):
        raise argparse.ArgumentTypeError(f"no method is called {', '.join(unknown)}; choose of {_METHODS}")
    return _words(text)


def _faults(text: str) -> tuple[FaultKind, ...]:
    if text == "none":
        return ()
    if text == "all":
        return tuple(FaultKind)
    if unknown := sorted(set(text.split(",")) - set(FaultKind)):
        raise argparse.ArgumentTypeError(
            f"no fault is called {', '.join(unknown)}; choose of {', '.join(FaultKind)}, or all or none"
        )
    return tuple(map(FaultKind, text.split(",")))


def options_of(given: argparse.Namespace, *, seed: int) -> list[Options]:
    """The runs that the arguments describe, one per database."""
    databases = DATABASES if given.database == "both" else (given.database,)
    return [
        Options(
            seed=seed, database=database, seconds=given.seconds, faults=given.faults, lanes=given.lanes,
            callers=given.callers, at_once=given.at_once, calls=given.calls, cancels=given.cancels,
            server=given.server, methods=given.methods,
        )
        for database in databases
    ]  # fmt: skip
