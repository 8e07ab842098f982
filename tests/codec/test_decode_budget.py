"""The cost of decoding the worst texts, counted and not timed; large texts are decoded on a thread."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from nekro.wire import decode_pool
from nekro.wire.budget import MEMORY_FACTOR, DecodeBudget, DecodeMeter
from nekro.wire.decode_pool import INLINE_CHARS, DecodePool
from nekro.wire.parser import SLICE_STEPS, load_in_slices
from nekro.wire.values import arguments_in_slices, encode_arguments
from nekro_agent.errors import ArgumentError

MIB = 1 << 20
MOST = DecodeBudget()
LONG_FRACTION = f'{{"$fraction":[{2**4095 - 19},{2**4095 - 1}]}}'

#: Results of a search for the costliest texts of 1 MiB, by the repeated part.
UNITS: dict[str, str] = {
    "arrays in each other": "[" * 60 + "]" * 60,
    "objects of one empty key": '{"":1}',
    "objects in each other": '{"":' * 60 + "1" + "}" * 60,
    "paths": '{"$path":"a"}',
    "long paths": '{"$path":"' + "a/" * 2000 + '"}',
    "offsets": '{"$timezone":[1]}',
    "named offsets": '{"$timezone":[1,"x"]}',
    "complex numbers": '{"$complex":[1.0,2.0]}',
    "tuples of one": '{"$tuple":[1]}',
    "empty sets": '{"$set":[]}',
    "frozensets": '{"$frozenset":["a"]}',
    "intervals": '{"$timedelta":[1,2,3]}',
    "moments with a zone": '{"$datetime":["2024-01-01T00:00:00.000001",0,{"$zone":"UTC"}]}',
    "UUIDs": '{"$uuid":"' + "0" * 32 + '"}',
    "fractions": '{"$fraction":[1,3]}',
    "fractions of 4095 bits": LONG_FRACTION,
    "long decimals": '{"$decimal":"1.' + "1" * 1290 + '"}',
    "long integers": "9" * 1233,
    "integers of 19 digits": "9" * 19,
    "floats": "0.30000000000000004",
    "empty texts": '""',
    "escapes": '"\\n"',
    "empty arrays": "[]",
    "empty objects": "{}",
    "not a number": '{"$float":"nan"}',
    "bytes": '{"$bytes":""}',
    "sets of fractions": '{"$set":[{"$fraction":[1,3]}]}',
}


def repeated(unit: str, size: int = MIB) -> str:
    return "[" + ",".join([unit] * ((size - 2) // (len(unit) + 1))) + "]"


def cost_of(text: str) -> tuple[DecodeMeter, int, object]:
    """Read a text; returns its cost, its slices, and the value or None when it was refused."""
    meter = DecodeMeter(MOST)
    slices = load_in_slices(text, meter)
    for count in itertools.count():
        try:
            next(slices)
        except StopIteration as end:
            return meter, count, end.value
        except ArgumentError:
            return meter, count, None
    raise AssertionError


def built_bytes(value: object) -> int:
    """Memory of a value as the interpreter counts it; a shared part counts once per reference."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(built_bytes(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return size + sum(map(built_bytes, value))
    return size


@pytest.mark.extended
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_no_text_of_one_mebibyte_exceeds_the_budget(unit: str) -> None:
    meter, slices, _ = cost_of(repeated(unit))
    # One slice and one constructor may be in progress when the budget is exhausted.
    assert meter.steps <= MOST.steps + 2 * SLICE_STEPS
    assert meter.built_bytes <= MOST.built_bytes
    assert slices >= meter.steps // (2 * SLICE_STEPS) - 1, "it stops in between, so that others can go on"


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_memory_is_counted_in_full_and_bounded_by_the_text(unit: str) -> None:
    text = repeated(unit, 40_000)
    meter, _, value = cost_of(text)
    assert value is not None
    assert built_bytes(value) <= meter.built_bytes + 1000
    assert meter.built_bytes <= MEMORY_FACTOR * len(text)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ('{"$fraction":[1,3]}', LONG_FRACTION),
        ("9" * 19, "9" * 1233),
        ('{"$decimal":"1"}', '{"$decimal":"' + "1" * 1300 + '"}'),
        ('{"$path":"a"}', '{"$path":"' + "a/" * 2000 + '"}'),
        ('{"$set":[1]}', '{"$set":[1,2,3,4,5,6,7,8]}'),
        ('{"$dict":[1,1]}', '{"$dict":[1,1,2,2,3,3]}'),
        ('{"$bytes":""}', '{"$bytes":"' + "AAAA" * 1000 + '"}'),
    ],
)
def test_constructors_are_charged_by_the_size_of_what_they_build(small: str, large: str) -> None:
    assert cost_of(large)[0].steps > cost_of(small)[0].steps


def test_an_expired_time_budget_ends_the_reading() -> None:
    text = repeated("1", 100_000)
    with pytest.raises(ArgumentError, match="more than 0 s to read"):
        for _ in load_in_slices(text, DecodeMeter(DecodeBudget(seconds=0))):
            pass


async def test_only_texts_longer_than_one_slice_are_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call with 16 KiB of text had been sent to the thread, which took longer than the call itself."""
    threads: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        slices = arguments_in_slices(*args, **kwargs)
        while True:
            threads.append(threading.current_thread().name)
            try:
                yield next(slices)
            except StopIteration as end:
                return end.value

    monkeypatch.setattr(decode_pool, "arguments_in_slices", noted)
    pool, me = DecodePool(), threading.current_thread().name

    async def read_by(*args: Any) -> set[str]:
        threads.clear()
        assert await pool.read(encode_arguments(args, {}), chat_key="c", max_bytes=MIB) == (args, {})
        return set(threads)

    assert await read_by(1) == set(), "short texts have a reader of their own"
    assert await read_by("x" * (INLINE_CHARS - 100)) == {me}
    assert await read_by(b"x" * (INLINE_CHARS // 2)) == {me}
    assert await read_by([{}] * 2000) == {me, "nekro-decode"}
    assert await read_by("x" * INLINE_CHARS) == {"nekro-decode"}


async def test_a_refused_text_is_refused_by_the_thread_and_the_next_one_is_read() -> None:
    pool = DecodePool()
    with pytest.raises(ArgumentError, match="malformed"):
        await pool.read("[" * 60 + "x" * INLINE_CHARS, chat_key="c", max_bytes=MIB)
    text = encode_arguments(([0] * INLINE_CHARS,), {})
    assert await pool.read(text, chat_key="c", max_bytes=MIB) == (([0] * INLINE_CHARS,), {})


async def test_garbage_collection_is_paused_while_a_text_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: list[bool] = []

    def noted(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for step in arguments_in_slices(*args, **kwargs):
            states.append(gc.isenabled())
            yield step

    monkeypatch.setattr(decode_pool, "arguments_in_slices", noted)
    pool, refused = DecodePool(), f"[[{repeated('[]', 200_000)}],{{}}]x"
    with pytest.raises(ArgumentError):
        await pool.read(refused, chat_key="c", max_bytes=MIB)
    assert states
    assert not any(states)
    while any(thread.name == "nekro-decode" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    assert gc.isenabled()


async def test_a_process_without_room_for_a_thread_refuses_large_texts_and_reads_the_next_one() -> None:
    """It had waited for ever for a thread that could not start, and blocked every later large call."""
    pool, text = DecodePool(), encode_arguments(("x" * INLINE_CHARS,), {})
    usual = threading.stack_size(1 << 47)  # more than the address space
    try:
        with pytest.raises(RuntimeError, match="thread"):
            await asyncio.wait_for(pool.read(text, chat_key="c", max_bytes=MIB), WAIT_SECONDS)
    finally:
        threading.stack_size(usual)
    again = pool.read(text, chat_key="c", max_bytes=MIB)
    assert await asyncio.wait_for(again, WAIT_SECONDS) == (("x" * INLINE_CHARS,), {})


async def test_large_arguments_of_one_chat_do_not_delay_those_of_another() -> None:
    """Slices of both chats' texts alternate; measured by the number of finished ones."""
    pool, ended = DecodePool(), []
    costly = f"[[{repeated('[]', 300_000)}],{{}}]"

    async def read(chat_key: str, text: str) -> None:
        await pool.read(text, chat_key=chat_key, max_bytes=MIB)
        ended.append(chat_key)

    attack = [asyncio.create_task(read("heavy", costly)) for _ in range(20)]
    await asyncio.sleep(0)
    await read("light", f"[[{repeated('[]', 2 * INLINE_CHARS)}],{{}}]")
    assert ended == ["light"]
    for task in attack:
        task.cancel()
    await asyncio.gather(*attack, return_exceptions=True)
    # Cancelled readings are dropped at their next slice, so the thread is free for other tests.
    await read("light", encode_arguments(("x" * INLINE_CHARS,), {}))


@pytest.mark.extended
async def test_the_loop_runs_between_slices() -> None:
    pool = DecodePool()
    unit = '{"a":1}'
    costly = f"[[{repeated(unit, 900_000)}],{{}}]"
    reading = asyncio.ensure_future(pool.read(costly, chat_key="c", max_bytes=MIB))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(ArgumentError, match="steps to read"):
        await reading
    assert turns > 100
