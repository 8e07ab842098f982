"""What background jobs promise to plugins, through the plugin API, on each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from runtime_bench import Bench, RecordingPublisher, emptied, shutdown
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import StoreSettings
from nekro.app.background import BackgroundLoop
from nekro_agent import runtime
from nekro_agent.api.plugin import NekroPlugin, TaskCtl, TaskSignal, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.errors import InvalidValueError
from nekro_agent.execution.greenlets import Bridged
from nekro_agent.jobs import AsyncTaskHandle
from nekro_agent.runtime import Runtime
from nekro_agent.testing import InMemoryRuntime
from storage.files.areas import DataAreas
from storage.kv import SqlKeyValueStore
from workers.jobs.service import SqlJobs
from workers.sdk_runtime import SqlMessages, SqlRecords


@dataclass
class World:
    """A plugin whose jobs run, and what its jobs reported to the test."""

    plugin: NekroPlugin
    reported: list[Any] = field(default_factory=list)
    went_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, task_type: str, *args: Any, name: str = "one", **kwargs: Any) -> AsyncTaskHandle:
        return await task.start(task_type, name, "chat", self.plugin, *args, **kwargs)

    async def ended(self, task_type: str, name: str = "one") -> TaskCtl:
        """Wait until the job has ended; returns its last report."""
        return await self.until(task_type, lambda state: state.is_terminal, name)

    async def until(self, task_type: str, condition: Callable[[TaskCtl], bool], name: str = "one") -> TaskCtl:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                state = task.get_state(task_type, name)
                if state is not None and condition(state):
                    return state
                await asyncio.sleep(0.01)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    plugin = NekroPlugin(name="Jobs", module_name="jobs", description="", version="1", author="tests", url="")
    world = World(plugin)
    mount(world)
    if request.param == "memory":
        async with InMemoryRuntime(plugin, data_dir=tmp_path):
            yield world
        return
    database = await emptied(request.getfixturevalue("migrated")(request.param), tmp_path)
    background, recorder = BackgroundLoop(database), RecordingPublisher()
    runner = Bench(database, background, recorder).runner(plugin)
    recorder.run_job = lambda job_id: runner.run(job_id, interruption=shutdown)
    services = Runtime(
        data_dir=tmp_path,
        store=SqlKeyValueStore(database, StoreSettings()),
        messages=SqlMessages(database, recorder),
        areas=DataAreas(tmp_path),
        jobs=SqlJobs(database, background, recorder),
        records=SqlRecords(database, recorder),
    )
    with runtime.bound(services):
        yield world
        await recorder.stop()
    await asyncio.to_thread(background.close)
    await database.dispose()


def mount(world: World) -> None:
    plugin = world.plugin

    @plugin.mount_async_task("echo")
    async def echo(handle: AsyncTaskHandle, *args: Any, **kwargs: Any) -> Any:
        world.reported.append((handle.task_id, handle.chat_key, args, kwargs))
        return {"args": len(args)}

    @plugin.mount_async_task("steps")
    async def steps(handle: AsyncTaskHandle, last: str) -> AsyncIterator[TaskCtl]:
        yield TaskCtl.report_progress("half", 50)
        await world.went_on.wait()
        if last == "success":
            yield TaskCtl.success("all", data=[1, 2])
        elif last == "fail":
            yield TaskCtl.fail("no luck", ValueError("why"))
        elif last == "cancel":
            yield TaskCtl.cancel("not today")

    @plugin.mount_async_task("sends")
    async def sends(handle: AsyncTaskHandle) -> str:
        file = plugin.get_plugin_data_dir() / "report.txt"
        file.write_text("report", "utf-8")
        ctx = await AgentCtx.create_by_chat_key(handle.chat_key)
        await ctx.send_file(file)
        return str(ctx.plugin_key)

    @plugin.mount_async_task("wrong")
    async def wrong(handle: AsyncTaskHandle, how: str) -> Any:
        if how == "exit":
            raise SystemExit(3)
        raise KeyError(how)

    @plugin.mount_async_task("asks")
    async def asks(handle: AsyncTaskHandle, seconds: float | None = None) -> Any:
        answer = await handle.wait("answer", timeout=seconds)
        await handle.notify_agent(f"got {answer}", trigger=False)
        return answer

    @plugin.mount_async_task("endless")
    async def endless(handle: AsyncTaskHandle) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            world.reported.append("cleaned up")


async def test_a_job_sends_a_file_of_its_plugin(world: World) -> None:
    await world.start("sends")
    last = await world.ended("sends")
    assert (last.signal, last.data) == (TaskSignal.SUCCESS, "tests.jobs")


async def test_coroutine_succeeds_by_returning(world: World) -> None:
    handle = await world.start("echo", 1, b"\0", key=("a", {1}))
    assert (await world.ended("echo")) == TaskCtl.success(data={"args": 2})
    assert world.reported == [("one", "chat", (1, b"\0"), {"key": ("a", {1})})]
    assert not task.is_running("echo", "one") and task.get_handle("echo", "one") is None
    assert handle.notify("late") is False


async def test_plain_values_of_every_kind_arrive(world: World) -> None:
    values = (None, True, 2**70, -1.5, "\0é", b"x", [1], (1,), {2}, {"k": [1]}, Decimal("1.50"))
    moment = datetime(2031, 2, 3, 4, 5, tzinfo=UTC)
    await world.start("echo", *values, moment=moment)
    await world.ended("echo")
    assert world.reported[0][2:] == (values, {"moment": moment})


async def test_progress_shows_before_the_end(world: World) -> None:
    await world.start("steps", "success")
    state = await world.until("steps", lambda state: state.progress == 50)
    assert (state.signal, state.message) == (TaskSignal.PROGRESS, "half")
    assert task.is_running("steps", "one")
    world.went_on.set()
    assert await world.ended("steps") == TaskCtl.success("all", data=[1, 2])


@pytest.mark.parametrize(
    ("last", "signal", "message"),
    [
        ("fail", TaskSignal.FAIL, "no luck"),
        ("cancel", TaskSignal.CANCEL, "not today"),
        ("nothing", TaskSignal.FAIL, "without TaskCtl.success"),
    ],
)
async def test_generator_ends_with_its_reported_state_and_fails_without_one(
    world: World, last: str, signal: TaskSignal, message: str
) -> None:
    world.went_on.set()
    await world.start("steps", last)
    state = await world.ended("steps")
    assert state.signal is signal and message in state.message


@pytest.mark.parametrize(("how", "shown"), [("missing", "KeyError: 'missing'"), ("exit", "SystemExit: 3")])
async def test_exception_is_a_failure_that_names_it(world: World, how: str, shown: str) -> None:
    await world.start("wrong", how)
    state = await world.ended("wrong")
    assert state.signal is TaskSignal.FAIL and shown in state.message


async def test_one_job_of_a_name_is_open_at_a_time(world: World) -> None:
    await world.start("asks")
    with pytest.raises(InvalidValueError, match="running already"):
        await world.start("asks")
    second = await world.start("asks", name="two")
    assert set(task.get_running_tasks()) == {"asks:one", "asks:two"}
    assert second.notify("answer", 2)
    assert await world.ended("asks", "two") == TaskCtl.success(data=2)
    assert await world.start("asks", name="two")


async def test_unknown_type_is_refused(world: World) -> None:
    with pytest.raises(InvalidValueError, match="no task type 'none'"):
        await world.start("none")


async def test_notify_before_the_wait_is_stored(world: World) -> None:
    handle = await world.start("asks")
    assert handle.notify("answer", {"n": (1, b"x")})
    assert (await world.ended("asks")).signal is TaskSignal.SUCCESS


async def test_notify_works_from_a_thread_and_from_a_plugin_coroutine(world: World) -> None:
    handle = await world.start("asks")
    assert await asyncio.to_thread(handle.notify, "other", 1)

    async def method() -> bool:
        return task.is_running("asks", "one") and handle.notify("answer", 7)

    assert await Bridged(method())
    assert await world.ended("asks") == TaskCtl.success(data=7)


async def test_wait_ends_at_its_time_limit(world: World) -> None:
    await world.start("asks", 0.05)
    state = await world.ended("asks")
    assert state.signal is TaskSignal.FAIL and "TimeoutError" in state.message


async def test_cancelled_job_cleans_up_and_ends_as_cancelled(world: World) -> None:
    handle = await world.start("endless")
    assert not handle.is_cancelled
    await world.until("endless", lambda _: task.is_running("endless", "one"))
    await asyncio.sleep(0)
    assert await task.cancel("endless", "one")
    assert (await world.ended("endless")).signal is TaskSignal.CANCEL
    assert handle.is_cancelled
    assert await task.cancel("endless", "one") is False
    assert await task.cancel("endless", "unknown") is False


async def test_cancelled_wait_ends_its_job(world: World) -> None:
    handle = await world.start("asks")
    await eventually(lambda: handle.cancel_wait("answer"), what="the wait to begin")
    assert (await world.ended("asks")).signal is TaskSignal.CANCEL
    assert handle.cancel_wait("answer") is False
    assert handle.cancel_all() == 0


async def test_starter_gets_a_callback_at_the_end(world: World) -> None:
    terminal = asyncio.get_running_loop().create_future()
    await world.start("echo", on_terminal=terminal.set_result)
    async with asyncio.timeout(WAIT_SECONDS):
        assert await terminal == TaskCtl.success(data={"args": 0})


async def test_job_sends_its_result_to_its_chat(world: World) -> None:
    handle = await world.start("asks")
    handle.notify("answer", "tea")
    await world.ended("asks")
    rows = await runtime.current().service("records").messages(chat_key="chat", since=None, limit=9)
    assert [row.text for row in rows] == ["got tea"]


async def test_all_jobs_of_the_process_can_be_stopped(world: World) -> None:
    await world.start("asks")
    await world.start("endless")
    assert await task.stop_all() == 2
    assert (await world.ended("asks")).signal is TaskSignal.CANCEL
    assert (await world.ended("endless")).signal is TaskSignal.CANCEL
