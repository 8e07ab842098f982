"""Deadlines that share timers, and limits that behave like asyncio's timeouts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_clock import LoopClock

from nekro.base.deadlines import Deadlines, TimeLimits


@given(now=st.floats(0, 1e6), seconds=st.floats(0, 1e5))
def test_a_deadline_never_fires_early_and_its_delay_is_proportional(now: float, seconds: float) -> None:
    loop = asyncio.new_event_loop()
    try:
        loop.time = lambda: now  # type: ignore[method-assign]
        deadlines = Deadlines[str](loop, lambda entry: None)
        tick = deadlines.add("entry", seconds)
        late = tick * 0.05 - (now + seconds)
        assert -1e-6 <= late <= max(0.05, seconds / 30) + 1e-6
    finally:
        loop.close()


async def test_entries_of_about_the_same_time_share_a_timer_and_each_fires_once() -> None:
    fired: list[int] = []
    clock = LoopClock()
    deadlines = Deadlines[int](asyncio.get_running_loop(), fired.append)
    ticks = {number: deadlines.add(number, 0.8 + number / 100_000) for number in range(100)}
    for number in range(0, 100, 2):
        deadlines.discard(number, ticks[number])
    assert len(set(ticks.values())) <= 2
    await clock.forward(1)
    assert sorted(fired) == list(range(1, 100, 2))
    deadlines.discard(1, ticks[1])  # already in the past
    assert len(fired) == 50


async def test_a_failing_deadline_callback_does_not_stop_the_others(
    logged: list[tuple[str, dict[str, Any]]],
) -> None:
    fired: list[int] = []

    def tell(entry: int) -> None:
        if entry == 0:
            raise ValueError("no")
        fired.append(entry)

    deadlines = Deadlines[int](asyncio.get_running_loop(), tell)
    for number in range(3):
        deadlines.add(number, 0.01)
    await asyncio.sleep(0.2)
    assert sorted(fired) == [1, 2]
    assert [event for event, _ in logged] == ["deadline_callback_failed"]


async def test_closed_deadlines_do_not_fire() -> None:
    fired: list[int] = []
    deadlines = Deadlines[int](asyncio.get_running_loop(), fired.append)
    deadlines.add(1, 60)
    deadlines.close()
    await LoopClock().forward(100)
    assert fired == []


async def test_a_limit_cancels_only_what_is_awaited_inside_it() -> None:
    limits = TimeLimits()
    limit = limits.of(0.05)
    with pytest.raises(TimeoutError), limit:
        await asyncio.sleep(10)
    assert limit.is_over
    await asyncio.sleep(0.1)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_a_block_that_ends_in_time_is_not_cancelled() -> None:
    limits = TimeLimits()
    clock = LoopClock()
    limit = limits.of(60)
    with limit:
        await asyncio.sleep(0)
    await clock.forward(100)
    assert not limit.is_over


async def test_a_cancellation_from_outside_remains_a_cancellation() -> None:
    limits = TimeLimits()

    async def wait() -> None:
        with limits.of(0.05):
            try:
                await asyncio.sleep(10)
            finally:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()  # cancelled from outside after the limit has also expired

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(wait())


async def test_an_error_of_the_block_is_not_hidden() -> None:
    limits = TimeLimits()
    with pytest.raises(ValueError, match="its own"), limits.of(0.01):
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise ValueError("its own") from None


async def test_of_two_nested_limits_the_expired_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = TimeLimits()
    outer, inner = limits.of(0.05), limits.of(5)
    with pytest.raises(TimeoutError), outer, inner:
        await asyncio.sleep(10)
    assert outer.is_over and not inner.is_over
    # When both have expired, the outer one raises as well. They begin in the same tick.
    loop, now = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    monkeypatch.setattr(loop, "time", lambda: now)
    loop.call_soon(monkeypatch.undo)
    outer, inner = limits.of(0.05), limits.of(0.05)
    with pytest.raises(TimeoutError), outer, inner:
        await asyncio.sleep(10)
    assert outer.is_over and inner.is_over
