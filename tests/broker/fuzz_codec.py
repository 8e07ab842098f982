"""Fuzz the decoder: ``python tests/broker/fuzz_codec.py [seconds] [seed]``; exits 1 on a finding.

Mutates pickles of plain values and of the hostile corpus. Whatever comes out must be an
ArgumentError or a plain value that survives another round trip, in bounded time and memory.
"""

from __future__ import annotations

import pickle
import random
import resource
import sys
import time

from hostile_pickles import corpus

from broker_config.codec import decode_value
from nekro_agent.errors import ArgumentError

MAX_BYTES = 1 << 16
MAX_CASE_SECONDS = 2.0
MEMORY_BYTES = 2 << 30

PLAIN = [
    None, True, -5, 2**70, 1.5, "text", b"bytes", bytearray(b"x"), [1, [2, [3]]], (1, 2, 3), {"a": {"b": 1}},
    {1, 2}, frozenset({"x"}), [["shared"]] * 3, {"k" * 300: "v" * 300}, list(range(300)),
]  # fmt: skip


def mutate(data: bytes, seeds: list[bytes], source: random.Random) -> bytes:
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
            other = source.choice(seeds)
            start = source.randrange(len(other) + 1)
            mutated[at:at] = other[start : start + source.randint(1, 40)]
        else:
            mutated[at:at] = mutated[at : at + source.randint(1, 20)] * source.randint(1, 5)
    return bytes(mutated[:MAX_BYTES])


def check(data: bytes) -> bool:
    """Decode once; returns whether it was accepted. Anything but refusal or plain data raises."""
    begin = time.process_time()
    try:
        value = decode_value(data, max_bytes=MAX_BYTES)
    except ArgumentError:
        accepted = False
    else:
        again = decode_value(pickle.dumps(value, 4), max_bytes=64 * MAX_BYTES)
        assert repr(again) == repr(value), "another round trip changes the value"
        accepted = True
    assert time.process_time() - begin < MAX_CASE_SECONDS, "too slow"
    return accepted


def fuzz(seconds: float, seed: int) -> int:
    """Fuzz for a while; returns the number of inputs."""
    source = random.Random(seed)
    seeds = [pickle.dumps(value, protocol) for value in PLAIN for protocol in (4, 5)]
    seeds += [data[:2000] for _, data in corpus()]
    end, tried, accepted = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        data = mutate(source.choice(seeds), seeds, source)
        tried += 1
        try:
            if check(data):
                accepted += 1
                seeds.append(data)
        except Exception as exc:
            print(f"seed {seed}, input {tried}: {exc!r}\n{data!r}", file=sys.stderr)
            raise SystemExit(1) from exc
    print(f"{tried} inputs, {accepted} accepted, no finding (seed {seed})")
    return tried


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    fuzz(
        float(sys.argv[1]) if len(sys.argv) > 1 else 30,
        int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 32),
    )
