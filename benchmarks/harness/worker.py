"""The worker of contenders without a command of their own: ``python -m benchmarks.harness.worker MODULE``."""

from __future__ import annotations

import importlib
import sys

from benchmarks.harness.contender import Setup

__all__ = ["main", "worker_command"]


def worker_command(module: str) -> list[str]:
    """Return the command line that runs ``module.run_worker(setup)``."""
    return [sys.executable, "-m", "benchmarks.harness.worker", module]


def main(module: str) -> None:
    """Run the worker until a signal ends it."""
    importlib.import_module(module).run_worker(Setup.from_environment())


if __name__ == "__main__":
    main(sys.argv[1])
