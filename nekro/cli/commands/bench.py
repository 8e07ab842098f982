"""`nekro bench`: run a benchmark of the source tree."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro.cli.command import Deps, arg
from nekro_agent.errors import UsageError

__all__ = ["EPILOG", "Args", "run"]

EPILOG: Final = """\
examples:
  nekro bench
  nekro bench rpc -- --help

Benchmarks and the systems that they compare with are not part of the installed package: run this in a
source tree, after `make bench` has installed the `bench` extra once.
"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Arguments of `nekro bench`."""

    name: str = arg(
        nargs="?", metavar="NAME", default="rpc", help="module of `benchmarks/` (default: %(default)s)"
    )
    rest: list[str] = arg(nargs="*", metavar="ARGUMENT", help="arguments of the benchmark, after --")


def run(args: Args, deps: Deps) -> int:
    """Replace this process with the benchmark; its exit code is the command's."""
    root = Path(__file__).resolve().parents[3]
    folder = root / "benchmarks"
    names = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    if not names:
        raise UsageError(f"{folder} does not exist: benchmarks are in the source tree only; clone it")
    if args.name not in names:
        raise UsageError(f"no benchmark {args.name}; choose one of {', '.join(names)}")
    os.chdir(root)
    # Not a child process: Ctrl-C would kill it before it has stopped the servers that it started.
    os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{args.name}", *args.rest])  # noqa: S606
