"""Fuzz the decoder with mutated and generated texts of plain values and of the hostile corpus.

Every result must be an ArgumentError or a plain value that survives another round trip, within steps and
memory bounded by the length of the input. What the reader of short texts decides must equal the parser's
result. Each input follows from the seed and its number. Another process watches the decoding one, so an
input that kills the interpreter is reported as well.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
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

from hostile_texts import corpus

from nekro.wire.budget import MEMORY_FACTOR, PLAIN_TYPES, DecodeBudget, DecodeMeter
from nekro.wire.parser import load_in_slices
from nekro.wire.tagged import NotPlainError, write_text
from nekro.wire.values import Undecided, arguments_text, decode_arguments, load_short
from nekro_agent.errors import ArgumentError

MAX_BYTES = 1 << 16
#: Steps of any input per character: a value of one character, and its comma.
STEPS_PER_CHAR = 3
#: An alarm does not interrupt a decoder that hangs inside one C call.
MAX_INPUT_SECONDS = 5
STALL_SECONDS = 30
MEMORY_BYTES = 2 << 30
#: Up to this many accepted inputs are mutated further.
MAX_POOL = 2000
#: One in this many inputs is generated from the grammar instead of mutated.
GENERATED = 4

PLAIN: list[Any] = [
    None,
    True,
    -5,
    2**70,
    1.5,
    float("nan"),
    'text \u2028 \U0001f600 \\ "',
    b"bytes",
    bytearray(b"x"),
    [1, [2, [3]]],
    (1, 2, 3),
    {"a": {"b": 1}},
    {"$a": 1},
    {1, 2},
    {(1, "x"): frozenset({"x"})},
    [["row"]] * 3,
    {"k" * 300: "v" * 300},
    list(range(300)),
    [0.1 * number for number in range(50)],
    [datetime(2024, 2, 29, 1, 2, 3, 4, UTC), timedelta(1)],
    [Decimal("1.50"), Fraction(1, 3), 1 + 2j, UUID(int=7), PurePosixPath("/app/x")],
    [[1, "Paris"], {"limit": 5}],
]
TOKENS = (
    *'[]{},:"', "null", "true", "-1", "0", "1.5e3", '""', '"a"', '"\\u00e9"', '"\\ud83d\\ude00"', "[]", "{}",
    "[1,2,3,4,5,6]", " ", "\\ud800", "\\u0024", "1e5", "1E5", "1e999", "1e00000001", "-0", "01", "1.",
    "NaN", "-Infinity", "[" * 60, "]" * 60, "{\"$", "\\\\", "\\\"", "0.30000000000000004",
    "1234567890123456789",
    '{"a":1}', '{"$tuple":[1]}', '{"$set":[1,"a"]}', '{"$frozenset":[]}',
    '{"$dict":[1,2]}', '{"$ordered":["a",1]}', '{"$bytes":"YQ=="}', '{"$float":"-inf"}',
    '{"$complex":[1.0,2.0]}',
    '{"$datetime":"2024-01-01T00:00:00"}', '{"$time":["01:02:03.000004",1,{"$timezone":[0]}]}',
    '{"$timezone":[60000000,"x"]}', '{"$zone":"UTC"}', '{"$decimal":"1E+3"}', '{"$fraction":[1,3]}',
    '{"$uuid":"00000000000000000000000000000007"}', '{"$path":"a/../b"}', '{"$date":"2024-02-29"}',
    '{"$timedelta":[1,2,3]}', '{"$', '"$tuple":', "\\u", "\\", "e9", "99999999999999999999",
)  # fmt: skip


def mutate(data: bytes, pool: list[bytes], source: random.Random) -> bytes:
    """Change some bytes, splice two inputs, repeat or drop a part, or insert a token."""
    mutated = bytearray(data)
    for _ in range(source.randint(1, 5)):
        at = source.randrange(len(mutated) + 1)
        kind = source.randrange(6)
        if kind == 0:
            mutated[at:at] = bytes([source.randrange(256)])
        elif kind == 1:
            del mutated[at : at + source.randint(1, 4)]
        elif kind == 2 and at < len(mutated):
            mutated[at] = source.randrange(32, 127)
        elif kind == 3:
            other = source.choice(pool)
            start = source.randrange(len(other) + 1)
            mutated[at:at] = other[start : start + source.randint(1, 40)]
        elif kind == 4:
            mutated[at:at] = source.choice(TOKENS).encode()
        else:
            mutated[at:at] = mutated[at : at + source.randint(1, 20)] * source.randint(1, 5)
    return bytes(mutated[:MAX_BYTES])


def generate(source: random.Random, depth: int = 0) -> str:
    """Generate a text that mostly follows the grammar."""
    kind = source.randrange(8)
    if depth > 4 or kind < 3:
        return source.choice(TOKENS[7:])
    parts = [generate(source, depth + 1) for _ in range(source.randrange(5))]
    if kind < 5:
        return f"[{','.join(parts)}]"
    if kind == 5:
        return "{" + ",".join(f'"{chr(97 + index)}":{part}' for index, part in enumerate(parts)) + "}"
    tag = source.choice(("tuple", "set", "frozenset", "dict", "ordered", "complex", "fraction", "datetime"))
    return f'{{"${tag}":[{",".join(parts)}]}}'


def inputs(seed: int, pool: list[bytes]) -> Iterator[bytes]:
    """Yield texts for ever; ``pool`` may grow meanwhile."""
    source = random.Random(seed)
    while True:
        if source.randrange(GENERATED):
            yield mutate(source.choice(pool), pool, source)
        else:
            yield generate(source).encode()[:MAX_BYTES]


def read(data: bytes, meter: DecodeMeter) -> object:
    """Decode with a meter that can be read afterwards."""
    slices = load_in_slices(arguments_text(data), meter)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def is_accepted(data: bytes) -> bool:
    """Decode once; returns whether it was accepted. Raises for anything but a refusal or plain data."""
    meter = DecodeMeter(DecodeBudget())
    signal.setitimer(signal.ITIMER_REAL, MAX_INPUT_SECONDS)
    try:
        value = read(data, meter)
    except ArgumentError:
        assert short_form(data) is None, "the reader of short texts accepts it, the parser does not"
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert meter.steps <= STEPS_PER_CHAR * len(data) + 8, f"{meter.steps} steps for {len(data)} bytes"
        assert meter.built_bytes <= MEMORY_FACTOR * (len(data) + 8), f"{meter.built_bytes} bytes built"
    if type(value) is list and len(value) == 2:
        with contextlib.suppress(ArgumentError):  # neither a list nor a dict of names
            decode_arguments(data, max_bytes=MAX_BYTES)
    strange = {type(part) for part in parts_of(value)} - PLAIN_TYPES
    assert not strange, f"it builds {strange}"
    try:
        text = write_text(value, 64 * MAX_BYTES)
    except NotPlainError as exc:
        # The reader refuses integers wider than the writer's limit as well.
        raise AssertionError(f"it cannot be written again: {exc}") from exc
    assert short_form(data) in (None, form(value)), "the reader of short texts reads another value"
    again = read(text.encode(), DecodeMeter(DecodeBudget()))
    assert form(again) == form(value), "another round trip changes the value"
    return True


def short_form(data: bytes) -> str | None:
    """Result of the reader of short texts as text; None when it leaves the input to the parser."""
    try:
        return form(load_short(arguments_text(data)))
    except (Undecided, ArgumentError):
        return None


def form(value: Any) -> str:
    """Spell out a value with its types; sets are sorted, and NaN equals itself."""
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
    """Raise for an input that takes too long."""
    raise TimeoutError(f"it takes longer than {MAX_INPUT_SECONDS} s")


def fuzz(
    seed: int, seconds: float, count: int, tried: Synchronized[int], accepted: Synchronized[int]
) -> None:
    """Decode input after input; exits 1 at a finding."""
    signal.signal(signal.SIGALRM, give_up)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    pool = [write_text(value, MAX_BYTES).encode() for value in PLAIN]
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
        if tried.value >= count or time.monotonic() > end:
            return


def watch(seed: int, seconds: float, count: int) -> int:
    """Fuzz in a process of its own; returns an exit status."""
    context = multiprocessing.get_context("spawn")
    tried, accepted = context.Value("q", 0), context.Value("q", 0)
    process = context.Process(target=fuzz, args=(seed, seconds, count, tried, accepted))
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
    print(f"{tried.value} inputs, {accepted.value} accepted, no finding (seed {seed})")
    return 0


def main() -> int:
    """Read the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=None, help="how long (default: 60 without --inputs)")
    parser.add_argument("--inputs", type=int, default=None, help="how many (default: as many as fit)")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run (default: a random one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    seconds = args.seconds or (60.0 if args.inputs is None else float("inf"))
    return watch(seed, seconds, args.inputs or sys.maxsize)


if __name__ == "__main__":
    raise SystemExit(main())
