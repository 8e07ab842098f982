"""Tasks that belong to an object."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from nekro.base.tasks import OwnedTasks, clean_up_timeout, end_tasks, repeat
from nekro_agent.errors import StorageUnavailableError


async def test_a_step_is_repeated_after_one_that_failed() -> None:
    steps: list[int] = []
    is_third = asyncio.Event()

    async def step() -> None:
        steps.append(len(steps))
        if len(steps) == 3:
            is_third.set()
        raise StorageUnavailableError("it does not answer")

    task = asyncio.create_task(repeat(step, seconds=0, on_error="step_failed"))
    async with asyncio.timeout(20):
        await is_third.wait()
    await end_tasks(task)
    assert task.cancelled()


async def test_tasks_have_ended_when_their_owner_is_closed() -> None:
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fail() -> None:
        raise ValueError("not read by anyone")

    tasks = OwnedTasks("test")
    for work in (wait("one"), fail(), wait("two")):
        tasks.begin(work)
    await asyncio.sleep(0)
    await tasks.close()
    await tasks.close()
    assert sorted(ended) == ["one", "two"]


@pytest.mark.parametrize("is_done", [False, True])
async def test_ending_a_task_drops_its_error(is_done: bool) -> None:
    async def work() -> None:
        try:
            if not is_done:
                await asyncio.Event().wait()
        finally:
            raise ValueError("its end fails")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await end_tasks(None, task)
    assert isinstance(task.exception(), ValueError)


async def cancelled(work: Coroutine[Any, Any, None], *, begun: asyncio.Event) -> asyncio.Task[None]:
    """Return the task of work that was cancelled once it had begun."""
    task = asyncio.create_task(work)
    await begun.wait()
    task.cancel()
    return task


async def test_the_limit_of_a_step_of_clean_up_ends_the_step_and_not_the_clean_up() -> None:
    begun, steps = asyncio.Event(), []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            try:
                async with clean_up_timeout(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                steps.append("limited")
            steps.append("next step")

    task = await cancelled(work(), begun=begun)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["limited", "next step"]


async def test_another_cancellation_ends_a_step_of_clean_up() -> None:
    begun, cleaning = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            async with clean_up_timeout(1000):
                cleaning.set()
                await asyncio.Event().wait()

    task = await cancelled(work(), begun=begun)
    await cleaning.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_step_of_clean_up_that_is_fast_enough_is_not_limited() -> None:
    async with clean_up_timeout(1000) as limit:
        await asyncio.sleep(0)
    assert not limit.expired()
    with pytest.raises(ZeroDivisionError):
        async with clean_up_timeout(1000):
            raise ZeroDivisionError
