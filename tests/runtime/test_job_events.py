"""Events of background jobs and detached calls in the stream of their chat."""

from __future__ import annotations

import asyncio

import pytest
from runtime_bench import Bench, shutdown
from waiting import eventually

from nekro_agent.api.plugin import NekroPlugin, TaskCtl
from nekro_agent.errors import MethodFailedError
from nekro_agent.execution.current import CurrentCall, serving
from nekro_agent.jobs import AsyncTaskHandle
from nekro_agent.ports import JobRequest
from storage.engine import Database
from storage.repositories.events import ChatEvent
from workers.jobs import running
from workers.jobs.service import SqlJobs

CALL = CurrentCall(call_id="call", chat_key="c", round_id="round", turn_id="turn")


async def start(jobs: SqlJobs, *, chat_key: str = "c") -> str:
    request = JobRequest(plugin_key="tests.jobs", task_type="work", task_id="1", chat_key=chat_key)
    with serving(CALL):
        return (await jobs.start(request)).id


async def events(database: Database) -> list[ChatEvent]:
    async with database.read() as tx:
        return await tx.events.after("c", number=0, limit=100)


@pytest.fixture(autouse=True)
async def chat(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("c")


async def test_a_job_records_its_start_progress_and_end_as_events_of_its_chat(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    half_seen = asyncio.Event()

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle):  # type: ignore[no-untyped-def]
        yield TaskCtl.report_progress("half", 50)
        await half_seen.wait()
        yield TaskCtl.success("done")

    job_id = await start(jobs)
    run = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=shutdown))

    async def has_progress() -> bool:
        return any(event.type == "job.progress" for event in await events(database))

    await eventually(has_progress, what="the progress")
    half_seen.set()
    await run
    found = await events(database)
    assert [(event.type, event.data["state"], event.data["percent"]) for event in found] == [
        ("job.started", "queued", 0),
        ("job.progress", "running", 50),
        ("job.ended", "succeeded", 100),
    ]
    for event in found:
        assert (event.turn_id, event.round_id, event.call_id) == ("turn", "round", "call")
        assert event.data["job_id"] == job_id
    async with database.read() as tx:
        assert [job.id for job in await tx.jobs.of_turn("turn")] == [job_id]


async def test_many_reports_of_a_job_are_few_events(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_EVENT_SECONDS", 600)

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle):  # type: ignore[no-untyped-def]
        for percent in range(20):
            yield TaskCtl.report_progress("", percent)
            await eventually(lambda percent=percent: len(bench.announced) > percent)  # type: ignore[misc]
        yield TaskCtl.success("done")

    await bench.runner(plugin).run(await start(jobs), interruption=shutdown)
    assert [event.type for event in await events(database)] == ["job.started", "job.progress", "job.ended"]


async def test_cancelled_and_failed_jobs_end_once(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    assert await jobs.cancel(await start(jobs))

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        raise ValueError("broken")

    with pytest.raises(MethodFailedError):
        await bench.runner(plugin).run(await start(jobs), interruption=shutdown)
    ends = [event.data["state"] for event in await events(database) if event.type == "job.ended"]
    assert ends == ["cancelled", "failed"]


async def test_a_job_of_another_chat_is_not_part_of_the_turn(database: Database, jobs: SqlJobs) -> None:
    job_id = await start(jobs, chat_key="other")
    async with database.read() as tx:
        job = await tx.jobs.get(job_id)
    assert (job.turn_id, job.round_id, job.call_id) == (None, None, None)
