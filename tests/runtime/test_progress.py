"""Progress reports of a call: a row among the jobs, Celery's state, and an event."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.events.state import State
from runtime_bench import RecordingPublisher
from waiting import WAIT_SECONDS

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.app.background import BackgroundLoop
from nekro.plugins.entries import MethodEntry
from nekro.plugins.registry import LoadedRegistry
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.ports import JobState
from nekro_agent.schemas.agent_ctx import AgentCtx
from storage.engine import Database
from storage.repositories.jobs import Job
from workers.calls.progress import CallReports, ProgressAnnouncer
from workers.jobs.service import SqlJobs


@pytest.fixture
def app(make_settings: Callable[..., Settings]) -> Iterator[Any]:
    app = create_app(make_settings())
    yield app
    app.backend.client.close()
    app.close()


@pytest.fixture
def announcer(app: Any) -> Iterator[ProgressAnnouncer]:
    announcer = ProgressAnnouncer(app)
    announcer.hostname = "w1@test"
    yield announcer
    announcer.close()


@pytest.fixture
def reports(
    database: Database,
    background: BackgroundLoop,
    announcer: ProgressAnnouncer,
    recorder: RecordingPublisher,
) -> CallReports:
    return CallReports(database, background, announcer, recorder, worker_name="w1")


@pytest.fixture
def entry() -> MethodEntry:
    plugin = NekroPlugin(name="P", module_name="p", description="", version="1", author="tests", url="")

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "fetch", "")
    async def fetch(_ctx: AgentCtx) -> None:
        """Fetch."""

    return next(iter(LoadedRegistry([plugin])))


def invocation() -> Invocation:
    now = datetime.now(UTC)
    return Invocation(
        call_id=new_id(),
        method="tests.p.fetch",
        chat_key="c",
        container_key="k",
        issued_at=now,
        deadline=now + timedelta(seconds=30),
        args="",
    )


async def row(database: Database, call_id: str, condition: Callable[[Job], bool]) -> Job:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            async with database.read() as tx:
                job = await tx.jobs.find(call_id)
            if job is not None and condition(job):
                return job
            await asyncio.sleep(0.01)


async def test_call_reports_its_progress_and_ends(
    database: Database, reports: CallReports, entry: MethodEntry
) -> None:
    call = invocation()
    with reports.following(entry, call) as on_progress:
        on_progress(10, "first")
        job = await row(database, call.call_id, lambda job: job.percent == 10)
        assert (job.type, job.plugin_key, job.chat_key, job.worker) == ("fetch", "tests.p", "c", "w1")
        assert job.state is JobState.RUNNING and job.lease_until is not None
        await asyncio.to_thread(on_progress, 20.4, "from a thread")
        await row(database, call.call_id, lambda job: (job.percent, job.message) == (20, "from a thread"))
    ended = await row(database, call.call_id, lambda job: job.state.is_final)
    assert (ended.state, ended.percent) == (JobState.SUCCEEDED, 100)


async def test_a_report_that_cannot_be_written_ends_no_other_one(
    database: Database, reports: CallReports, entry: MethodEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = invocation(), invocation()
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patch, reports.following(entry, first) as on_progress:
        patch.setattr(ProgressAnnouncer, "announce", fail)
        on_progress(10, "first")
        await asyncio.to_thread(failed.wait)
    with reports.following(entry, second) as on_progress:
        on_progress(20, "second")
        await row(database, second.call_id, lambda job: job.percent == 20)


async def test_failed_call_ends_as_failed_and_calls_without_reports_have_no_row(
    database: Database, reports: CallReports, entry: MethodEntry
) -> None:
    silent, failed = invocation(), invocation()
    with reports.following(entry, silent):
        pass
    with pytest.raises(ValueError, match="no"), reports.following(entry, failed) as on_progress:
        on_progress(10, "half-way")
        raise ValueError("no")
    ended = await row(database, failed.call_id, lambda job: job.state.is_final)
    assert (ended.state, ended.percent, ended.message) == (JobState.FAILED, 10, "half-way")
    async with database.read() as tx:
        assert await tx.jobs.find(silent.call_id) is None


async def test_row_of_a_call_is_not_a_job_of_the_plugin_and_is_cancelled_by_revoking_the_call(
    database: Database,
    background: BackgroundLoop,
    reports: CallReports,
    entry: MethodEntry,
    recorder: RecordingPublisher,
) -> None:
    jobs, call = SqlJobs(database, background, recorder), invocation()
    with reports.following(entry, call) as on_progress:
        on_progress(1, "")
        await row(database, call.call_id, lambda _: True)
        assert jobs.running() == []
        assert jobs.peek("tests.p", "fetch", call.call_id) is None
        assert await jobs.cancel(call.call_id)
    assert recorder.events == ["live call.progress", f"revoke {call.call_id}"]
    await row(database, call.call_id, lambda job: job.state.is_final)


async def test_celery_and_flower_see_progress(app: Any, announcer: ProgressAnnouncer, tmp_path: Path) -> None:
    task_id, state = new_id(), State()
    ready, seen = threading.Event(), threading.Event()

    def receive() -> None:
        def take(event: dict[str, Any]) -> None:
            state.event(event)
            if event["type"] == "task-progress" and event["percent"] == 7:
                seen.set()

        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": take})
            with receiver.consumer_context(wakeup=False):
                ready.set()
                for _ in receiver.consume(limit=None, timeout=0.2, wakeup=False):
                    if seen.is_set():
                        return

    receiving = asyncio.create_task(asyncio.to_thread(receive))
    await asyncio.to_thread(ready.wait, WAIT_SECONDS)
    announcer.announce(task_id, 7, "under way")
    await announcer.settled()
    found = app.AsyncResult(task_id)
    assert (found.state, found.info) == ("PROGRESS", {"percent": 7, "message": "under way"})
    # kombu subscribes at its first read and misses what was published before
    async with asyncio.timeout(WAIT_SECONDS):
        while not await asyncio.to_thread(seen.wait, 0.2):
            announcer.announce(task_id, 7, "under way")
    await receiving
    assert state.tasks[task_id].state == "PROGRESS"


async def test_late_report_does_not_overwrite_a_result(app: Any, announcer: ProgressAnnouncer) -> None:
    task_id = new_id()
    app.backend.store_result(task_id, "done", "SUCCESS")
    announcer.announce(task_id, 99, "nearly")
    await announcer.settled()
    assert app.AsyncResult(task_id).state == "SUCCESS"


async def test_broker_outage_loses_only_the_report(
    own_redis: Any, make_settings: Callable[..., Settings]
) -> None:
    app = create_app(make_settings(broker={"url": own_redis.url, "socket_timeout_seconds": 1}))
    own_redis.kill()
    announcer = ProgressAnnouncer(app)
    announcer.announce("t", 1, "")
    await announcer.settled()
    announcer.close()
    announcer.announce("t", 2, "")
    app.close()
