"""The loop of the fuzzers: one input after another from a seed, each within a budget of processor time."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

#: Processor time per input; the slowest input of a million takes well below a millisecond.
BUDGET_SECONDS: Final = 0.1

#: Generates one input, reads it, and raises when the reader is wrong.
Check = Callable[[random.Random], None]


def fuzz(name: str, checks: Sequence[Check], *, inputs: int, seed: int) -> int:
    """Run the checks in turn; returns the exit code: 1 at the first failure or exceeded budget."""
    chance = random.Random(seed)
    slowest, begin = 0.0, time.process_time()
    for number in range(inputs):
        check = checks[number % len(checks)]
        where = f"input {number} of seed {seed}: {check.__name__}"
        before = time.thread_time()
        try:
            check(chance)
        except Exception as exc:
            print(f"{where}: {exc!r}")
            return 1
        cost = time.thread_time() - before
        slowest = max(slowest, cost)
        if cost > BUDGET_SECONDS:
            print(f"{where} took {cost:.3f} s")
            return 1
    seconds = time.process_time() - begin
    print(f"{name}: {inputs} inputs, {seconds:.1f} s, slowest {slowest * 1000:.2f} ms, no failure")
    return 0


def main(name: str, checks: Sequence[Check], *, description: str) -> int:
    """Parse the command line and run; returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--inputs", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    return fuzz(name, checks, inputs=arguments.inputs, seed=arguments.seed)
