"""An outage of the database is not a failure of the plugin whose code runs meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cut_proxy import CutProxy
from database_outage import DatabaseOutage
from runtime_bench import Bench, RecordingPublisher, shutdown
from waiting import eventually

from broker_config.settings import DatabaseSettings, StoreSettings
from nekro.app.background import BackgroundLoop
from nekro_agent import runtime
from nekro_agent.api.plugin import NekroPlugin, TaskCtl, task
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.errors import BrokerUnavailableError, MethodFailedError, StorageUnavailableError
from nekro_agent.jobs import AsyncTaskHandle
from nekro_agent.ports import JobState
from nekro_agent.runtime import Runtime
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.kv import SqlKeyValueStore
from storage.repositories.jobs import MAX_DEATHS, Job
from workers.calls.claims import DuplicateDelivery
from workers.jobs.service import SqlJobs
from workers.sdk_runtime import SqlMessages


@dataclass
class World:
    """A worker whose database can be made unreachable."""

    outage: DatabaseOutage
    #: The same database, past the outage.
    past: Database
    bench: Bench
    plugin: NekroPlugin
    jobs: SqlJobs
    steps: list[str] = field(default_factory=list)

    async def run(self, job_id: str) -> None:
        await self.bench.runner(self.plugin).run(job_id, interruption=shutdown)

    async def row(self, job_id: str) -> Job:
        async with self.past.read() as tx:
            return await tx.jobs.get(job_id)


@pytest.fixture
async def world(
    kind_settings: DatabaseSettings, database: Database, plugin: NekroPlugin, tmp_path: Path
) -> AsyncIterator[World]:
    settings, proxy = kind_settings, None
    if not database.is_sqlite:
        proxy = CutProxy(kind_settings)
        settings = await proxy.start()
    outage = DatabaseOutage(str(settings.url), proxy)
    limits = {"transaction_timeout_seconds": 1, "pool_timeout_seconds": 1}
    limited = Database(settings.model_copy(update=limits), tmp_path)
    background, recorder = BackgroundLoop(limited), RecordingPublisher()
    jobs = SqlJobs(limited, background, recorder)
    services = Runtime(
        data_dir=tmp_path,
        store=SqlKeyValueStore(limited, StoreSettings()),
        messages=SqlMessages(limited, recorder),
        areas=DataAreas(tmp_path),
        jobs=jobs,
    )
    with runtime.bound(services):
        yield World(outage, database, Bench(limited, background, recorder), plugin, jobs)
        outage.come_back()
        await recorder.stop()
    await asyncio.to_thread(background.close)
    await limited.dispose()
    if proxy is not None:
        await proxy.stop()


async def test_a_loop_of_a_job_goes_on_while_the_database_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, away, looped, back = (threading.Event() for _ in range(4))
    monkeypatch.setattr("workers.jobs.service.ANSWER_SECONDS", 2.0)

    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle):  # type: ignore[no-untyped-def]
        await eventually(lambda: task.is_running("work", "1"), what="a first answer")
        asked.set()
        away.wait()
        for number in range(3):
            assert not handle.is_cancelled
            assert task.is_running("work", "1")
            handle.notify("later", number)
            yield TaskCtl.report_progress("going on", 10 * number)
        looped.set()
        back.wait()
        yield TaskCtl.success("done", data=await handle.wait("later"))

    handle = await task.start("work", "1", "chat", world.plugin)
    # On a thread, as on lane ``long``: its synchronous questions block it, and not the proxy.
    running = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(world.run(handle.job_id))))
    await asyncio.to_thread(asked.wait)
    world.outage.go_away()
    away.set()
    await asyncio.to_thread(looped.wait)
    world.outage.come_back()
    back.set()
    await running
    ended = await world.row(handle.job_id)
    assert (ended.state, ended.message, ended.attempt) == (JobState.SUCCEEDED, "done", 1)
    assert ended.data in range(3)


async def test_a_job_that_is_asked_to_end_notices_it_without_a_query(world: World) -> None:
    asked = asyncio.Event()

    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        asked.set()
        while not handle.is_cancelled:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                world.steps.append("interrupted")
        world.steps.append("noticed")

    handle = await task.start("work", "1", "chat", world.plugin)
    running = asyncio.create_task(world.run(handle.job_id))
    await asked.wait()
    assert await world.jobs.cancel(handle.job_id)
    await running
    assert world.steps[-1] == "noticed"


async def test_what_a_job_stores_and_sends_outlasts_a_short_outage(world: World) -> None:
    reached = asyncio.Event()

    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> str:
        world.outage.go_away()
        reached.set()
        await world.plugin.store.set(store_key="key", value="value")
        await handle.notify_agent("half", trigger=False)
        ctx = AgentCtx.for_call(chat_key="chat", plugin_key=world.plugin.key)
        await ctx.send_text("sent")
        return str(await world.plugin.store.get(store_key="key"))

    handle = await task.start("work", "1", "chat", world.plugin)
    running = asyncio.create_task(world.run(handle.job_id))
    await reached.wait()
    await asyncio.wait([running], timeout=1.5)
    assert not running.done()
    world.outage.come_back()
    await running
    ended = await world.row(handle.job_id)
    assert (ended.state, ended.data, ended.attempt) == (JobState.SUCCEEDED, "value", 1)
    async with world.past.read() as tx:
        assert [row.text for row in await tx.messages.newest("chat", limit=9)] == ["half", "sent"]


def _wrapped(error: Exception) -> Exception:
    other = RuntimeError("no luck")
    other.__cause__ = error
    return other


@pytest.mark.parametrize(
    "error",
    [
        StorageUnavailableError("away"),
        BrokerUnavailableError("away"),
        _wrapped(StorageUnavailableError("away")),
        ExceptionGroup("tasks", [ValueError(), StorageUnavailableError("away")]),
    ],
    ids=["database", "broker", "wrapped", "group"],
)
async def test_a_job_that_met_an_outage_starts_again(world: World, error: Exception) -> None:
    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> str:
        world.steps.append("run")
        if len(world.steps) == 1:
            raise error
        return "done"

    handle = await task.start("work", "1", "chat", world.plugin)
    with pytest.raises(DuplicateDelivery):
        await world.run(handle.job_id)
    between = await world.row(handle.job_id)
    assert (between.state, between.message[:27]) == (JobState.RUNNING, "starts again after an outag")
    async with world.past.begin() as tx:
        (lost,) = await tx.jobs.take_orphans(waiting_seconds=-60, limit=9)
    assert lost.id == handle.job_id
    await world.run(handle.job_id)
    ended = await world.row(handle.job_id)
    assert (ended.state, ended.data, ended.attempt) == (JobState.SUCCEEDED, "done", 2)
    async with world.past.read() as tx:
        assert await tx.messages.newest("chat", limit=9) == [], "nobody reads of an outage that passed"


async def test_a_job_that_meets_an_outage_each_time_fails_in_the_end(world: World) -> None:
    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        raise StorageUnavailableError("away")

    handle = await task.start("work", "1", "chat", world.plugin)
    for _ in range(MAX_DEATHS - 1):
        with pytest.raises(DuplicateDelivery):
            await world.run(handle.job_id)
    with pytest.raises(MethodFailedError, match="StorageUnavailableError"):
        await world.run(handle.job_id)
    assert (await world.row(handle.job_id)).state is JobState.FAILED


async def test_a_job_whose_exceptions_cause_each_other_fails(world: World) -> None:
    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first

    handle = await task.start("work", "1", "chat", world.plugin)
    with pytest.raises(MethodFailedError, match="first"):
        await world.run(handle.job_id)
    assert (await world.row(handle.job_id)).state is JobState.FAILED


async def test_a_job_that_must_not_restart_fails_at_an_outage(world: World) -> None:
    @world.plugin.mount_async_task("work", restarts=False)
    async def work(handle: AsyncTaskHandle) -> None:
        raise StorageUnavailableError("away")

    handle = await task.start("work", "1", "chat", world.plugin)
    with pytest.raises(MethodFailedError):
        await world.run(handle.job_id)
    assert (await world.row(handle.job_id)).state is JobState.FAILED


async def test_a_wait_for_a_signal_outlasts_an_outage(world: World) -> None:
    waiting = asyncio.Event()

    @world.plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> str:
        waiting.set()
        return str(await handle.wait("answer"))

    handle = await task.start("work", "1", "chat", world.plugin)
    running = asyncio.create_task(world.run(handle.job_id))
    await waiting.wait()

    async def is_waiting() -> bool:
        async with world.past.read() as tx:
            return await tx.job_signals.waiting_keys(handle.job_id, key=None) == ["answer"]

    await eventually(is_waiting, what="the wait")
    world.outage.go_away()
    await asyncio.wait([running], timeout=1.5)
    assert not running.done()
    world.outage.come_back()
    handle.notify("answer", "yes")
    await running
    assert (await world.row(handle.job_id)).data == "yes"
