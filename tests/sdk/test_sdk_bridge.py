"""Ordinary functions that wait for coroutines inside a coroutine."""

from __future__ import annotations

import asyncio
import contextvars

import pytest

from nekro_agent.execution.greenlets import Bridged, can_wait, wait

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def ordinary(value: int) -> int:
    async def later() -> int:
        await asyncio.sleep(0)
        return value * 2

    return wait(later())


async def test_an_ordinary_function_waits_while_the_loop_continues() -> None:
    gate = asyncio.Event()

    def blocked() -> str:
        wait(gate.wait())
        return "through"

    async def coroutine() -> str:
        await asyncio.sleep(0)
        return blocked() + str(ordinary(2))

    async def run() -> str:
        return await Bridged(coroutine())

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    assert await task == "through4"


async def test_results_errors_and_context_pass_through() -> None:
    async def coroutine(fail: bool) -> str:
        before = variable.get()
        variable.set("inside")
        await asyncio.sleep(0)
        if fail:
            raise KeyError("own")
        return before

    variable.set("outside")
    assert await Bridged(coroutine(False)) == "outside"
    assert variable.get() == "inside"
    with pytest.raises(KeyError, match="own"):
        await Bridged(coroutine(True))


async def test_an_error_of_the_awaited_coroutine_is_raised_in_the_function() -> None:
    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("inner")

    def catching() -> str:
        try:
            wait(failing())
        except ValueError as exc:
            return str(exc)
        return "nothing"

    async def coroutine() -> str:
        return catching()

    assert await Bridged(coroutine()) == "inner"


@pytest.mark.parametrize("in_function", [True, False])
async def test_cancellation_reaches_the_coroutine_and_its_function(in_function: bool) -> None:
    ended: list[str] = []
    forever = asyncio.Event()

    async def coroutine() -> None:
        try:
            if in_function:
                wait(forever.wait())
            else:
                await forever.wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            await asyncio.sleep(0)
            raise
        finally:
            ended.append("cleaned up")

    async def run() -> None:
        await Bridged(coroutine())

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cancelled", "cleaned up"]


async def test_a_timeout_around_the_coroutine_works() -> None:
    async def coroutine() -> None:
        wait(asyncio.Event().wait())

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await Bridged(coroutine())


async def test_the_current_task_is_that_of_the_caller() -> None:
    async def coroutine() -> asyncio.Task[None] | None:
        return asyncio.current_task()

    assert await Bridged(coroutine()) is asyncio.current_task()


async def test_concurrent_functions_keep_their_own_context() -> None:
    async def coroutine(value: int) -> int:
        total = 0
        for _ in range(3):
            total += ordinary(value)
            await asyncio.sleep(0)
        return total

    async def run(value: int) -> int:
        return await Bridged(coroutine(value))

    assert await asyncio.gather(*(run(n) for n in range(50))) == [6 * n for n in range(50)]


async def test_waiting_outside_of_the_bridge_is_refused() -> None:
    assert not can_wait()
    with pytest.raises(RuntimeError, match="directly inside a plugin's coroutine"):
        wait(asyncio.get_running_loop().create_future())

    async def in_a_task_of_its_own() -> bool:
        return can_wait()

    async def coroutine() -> tuple[bool, bool]:
        return can_wait(), await asyncio.create_task(in_a_task_of_its_own())

    assert await Bridged(coroutine()) == (True, False)
