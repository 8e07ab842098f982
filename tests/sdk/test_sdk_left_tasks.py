"""Tasks that an init leaves running are found, also while another plugin is initialised."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nekro.plugins.hooks import PluginHost, watched_tasks
from nekro_agent.plugin import NekroPlugin
from nekro_agent.runtime import bound
from nekro_agent.testing import InMemoryRuntime


@pytest.mark.parametrize("first_to_end", [0, 1])
async def test_overlapping_inits_find_their_own_tasks_and_restore_the_loop(
    tmp_path: Path, first_to_end: int
) -> None:
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    plugins = [NekroPlugin(f"p{n}", f"p{n}", "", "1", "Ada", "") for n in range(2)]
    begun, may_end = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    left: list[asyncio.Task[Any]] = []

    def mount(number: int) -> None:
        @plugins[number].mount_init_method()
        async def init() -> None:
            begun[number].set()
            await may_end[number].wait()
            left.append(asyncio.create_task(asyncio.Event().wait(), name=f"p{number}"))

    for number in range(2):
        mount(number)
    host = PluginHost(plugins)
    with bound(InMemoryRuntime(data_dir=tmp_path).runtime):
        starts = []
        for number in range(2):
            starts.append(asyncio.create_task(host.start_plugin(plugins[number])))
            await begun[number].wait()
        for number in (first_to_end, 1 - first_to_end):
            may_end[number].set()
            await starts[number]
        names = {key: [task.get_name() for task in tasks] for key, tasks in host.left_tasks.items()}
        assert names == {"Ada.p0": ["p0"], "Ada.p1": ["p1"]}
        assert loop.get_task_factory() is before
        await host.stop()
    await asyncio.gather(*left, return_exceptions=True)
    assert all(task.cancelled() for task in left)


async def test_a_factory_that_an_init_sets_stays_and_works() -> None:
    loop = asyncio.get_running_loop()
    before, made = loop.get_task_factory(), list[str]()

    def factory(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Future[Any]:
        made.append("own")
        found: asyncio.Future[Any] = ours(loop, work, **options)
        return found

    async def nothing() -> None:
        return

    async with watched_tasks():
        ours: Any = loop.get_task_factory()
        loop.set_task_factory(factory)
        async with watched_tasks() as created:
            await asyncio.create_task(nothing())
    assert (len(created), made) == (1, ["own"])
    assert loop.get_task_factory() is factory
    await asyncio.create_task(nothing())
    assert (len(created), made) == (1, ["own", "own"])
    loop.set_task_factory(before)
