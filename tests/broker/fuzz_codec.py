"""Fuzz the decoder: mutated pickles of plain values and of the hostile corpus.

Whatever comes out must be an ArgumentError or a plain value that survives another round trip,
each within a second. Each input follows from the seed and its number; the process that decodes
is watched by another, so an input that kills the interpreter is named as well.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from multiprocessing.sharedctypes import Synchronized
from pathlib import PurePosixPath
from types import FrameType
from typing import Any, NoReturn
from uuid import UUID

from hostile_pickles import corpus

from broker_config.codec import decode_arguments, decode_value
from broker_config.pickle_limits import PLAIN_TYPES
from nekro_agent.errors import ArgumentError

MAX_BYTES = 1 << 16
MAX_INPUT_SECONDS = 1
MEMORY_BYTES = 2 << 30
#: A decoder that is stuck inside one C call hears no alarm.
STALL_SECONDS = 10
#: Accepted inputs are mutated further, up to so many.
MAX_POOL = 2000

PLAIN: list[Any] = [
    None,
    True,
    -5,
    2**70,
    1.5,
    "text",
    b"bytes",
    bytearray(b"x"),
    [1, [2, [3]]],
    (1, 2, 3),
    {"a": {"b": 1}},
    {1, 2},
    {(1, "x"): frozenset({"x"})},
    [["shared"]] * 3,
    {"k" * 300: "v" * 300},
    list(range(300)),
    [datetime(2024, 2, 29, 1, 2, 3, 4, UTC), timedelta(1)],
    [Decimal("1.50"), Fraction(1, 3), 1 + 2j, UUID(int=7), PurePosixPath("/app/x")],
    ((1, "Paris"), {"limit": 5}),
]


def mutate(data: bytes, pool: list[bytes], source: random.Random) -> bytes:
    """Change some bytes, splice two inputs, repeat or drop a part."""
    mutated = bytearray(data)
    for _ in range(source.randint(1, 6)):
        at = source.randrange(len(mutated) + 1)
        kind = source.randrange(5)
        if kind == 0:
            mutated[at:at] = bytes([source.randrange(256)])
        elif kind == 1:
            del mutated[at : at + source.randint(1, 4)]
        elif kind == 2 and at < len(mutated):
            mutated[at] = source.randrange(256)
        elif kind == 3:
            other = source.choice(pool)
            start = source.randrange(len(other) + 1)
            mutated[at:at] = other[start : start + source.randint(1, 40)]
        else:
            mutated[at:at] = mutated[at : at + source.randint(1, 20)] * source.randint(1, 5)
    return bytes(mutated[:MAX_BYTES])


def inputs(seed: int, pool: list[bytes]) -> Iterator[bytes]:
    """Yield mutated pickles for ever; ``pool`` may grow meanwhile."""
    source = random.Random(seed)
    while True:
        yield mutate(source.choice(pool), pool, source)


def is_accepted(data: bytes) -> bool:
    """Decode once; returns whether it was accepted. Raises at anything but refusal or plain data."""
    signal.setitimer(signal.ITIMER_REAL, MAX_INPUT_SECONDS)
    try:
        value = decode_value(data, max_bytes=MAX_BYTES)
        if type(value) is tuple and len(value) == 2:
            decode_arguments(data, max_bytes=MAX_BYTES)
    except ArgumentError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    strange = {type(part) for part in parts_of(value)} - PLAIN_TYPES
    assert not strange, f"it builds {strange}"
    again = decode_value(pickle.dumps(value, 4), max_bytes=64 * MAX_BYTES)
    assert form(again) == form(value), "another round trip changes the value"
    return True


def form(value: Any) -> str:
    """Write a value out with its types; sets in an order of their own, and NaN equals itself."""
    if isinstance(value, dict):
        items = [f"{form(key)}: {form(part)}" for key, part in value.items()]
    elif isinstance(value, list | tuple):
        items = [form(part) for part in value]
    elif isinstance(value, set | frozenset):
        items = sorted(form(part) for part in value)
    else:
        return repr(value)
    return f"{type(value).__name__}({', '.join(items)})"


def parts_of(value: Any) -> Iterator[object]:
    """Yield a value and all values in it."""
    yield value
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from parts_of(part)


def give_up(number: int, frame: FrameType | None) -> NoReturn:
    """End an input that takes too long."""
    raise TimeoutError(f"it takes longer than {MAX_INPUT_SECONDS} s")


def fuzz(seed: int, seconds: float, tried: Synchronized[int], accepted: Synchronized[int]) -> None:
    """Decode input after input; exits 1 at a finding."""
    signal.signal(signal.SIGALRM, give_up)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    pool = [pickle.dumps(value, protocol) for value in PLAIN for protocol in (4, 5)]
    pool += [data[:2000] for _, data in corpus()]
    end = time.monotonic() + seconds
    for data in inputs(seed, pool):
        tried.value += 1
        try:
            if is_accepted(data):
                accepted.value += 1
                if len(pool) < MAX_POOL:
                    pool.append(data)
        except Exception as exc:
            print(f"seed {seed}, input {tried.value}: {exc!r}\n{data!r}", file=sys.stderr)
            raise SystemExit(1) from exc
        if time.monotonic() > end:
            return


def watch(seed: int, seconds: float) -> int:
    """Fuzz in a process of its own; returns an exit status."""
    context = multiprocessing.get_context("spawn")
    tried, accepted = context.Value("q", 0), context.Value("q", 0)
    process = context.Process(target=fuzz, args=(seed, seconds, tried, accepted))
    process.start()
    before = 0
    while process.is_alive():
        process.join(STALL_SECONDS)
        if process.is_alive() and tried.value == before > 0:
            process.kill()
        before = tried.value
    process.join()
    if process.exitcode != 0:
        end = f"signal {-process.exitcode}" if process.exitcode and process.exitcode < 0 else "an error"
        print(f"seed {seed}: input {tried.value} ended the fuzzer by {end}", file=sys.stderr)
        return 1
    print(f"{tried.value} inputs, {accepted.value} accepted, no finding (seed {seed}, {seconds:g} s)")
    return 0


def main() -> int:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run (default: a random one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    return watch(seed, args.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
