"""``python -m tests.faults``: load a real fleet, inject faults, and check the promises from outside."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fault_command import options_of, parse  # noqa: E402
from fault_plan import Options  # noqa: E402
from fault_run import run  # noqa: E402
from postgres_process import PostgresServer  # noqa: E402


def main() -> int:
    """Run once per database; returns 1 if a promise was broken."""
    given = parse(sys.argv[1:])
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    if given.redis is not None:
        os.environ["NEKRO_TEST_REDIS_SERVER"] = str(given.redis.absolute())
    broken = [run_one(options, given.keep) for options in options_of(given, seed=seed)]
    return 1 if any(broken) else 0


def run_one(options: Options, keep: Path | None) -> int:
    """Run and print; returns the number of violations."""
    directory = Path(tempfile.mkdtemp(prefix="nekro-faults-")) if keep is None else keep / options.database
    began = time.monotonic()
    print(f"{options.database}: {options.command()}", flush=True)
    with contextlib.ExitStack() as stack:
        is_postgres = options.database == "postgres"
        postgres = stack.enter_context(PostgresServer.temporary()) if is_postgres else None
        report = run(options, directory, postgres)
    print(f"after {time.monotonic() - began:.0f} s", *report.lines(), sep="\n", flush=True)
    if report.violations or keep is not None:
        print(f"logs: {directory}")
    else:
        shutil.rmtree(directory)
    return len(report.violations)


if __name__ == "__main__":
    sys.exit(main())
