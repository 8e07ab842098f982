"""Tasks that belong to an object."""

from __future__ import annotations

import asyncio

import pytest

from nekro_agent.errors import StorageUnavailableError
from runtime.tasks import OwnedTasks, end_tasks, repeat


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
