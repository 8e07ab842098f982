"""Jobs on workers that die, freeze, stop or lack the plugin; each job ends once, with its reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from runtime_bench import Bench, RecordingPublisher, shutdown
from waiting import WAIT_SECONDS, eventually

from broker_config.app import NekroApp
from broker_config.settings import AgentSettings
from nekro.app import leases
from nekro.app.background import BackgroundLoop
from nekro.app.chats.publisher import EventPublisher
from nekro_agent.api.plugin import NekroPlugin, TaskCtl
from nekro_agent.errors import (
    ArgumentError,
    ConflictError,
    MethodFailedError,
    NotFoundError,
    StorageUnavailableError,
)
from nekro_agent.jobs import AsyncTaskHandle
from nekro_agent.ports import JobRequest, JobState
from nekro_agent.shared_clock import elapsed_seconds
from storage.engine import Database
from storage.repositories.jobs import MAX_DEATHS, Job
from storage.repositories.leases import LeaseRepository, Renewal
from workers.calls.claims import DuplicateDelivery
from workers.jobs import runner as runner_module
from workers.jobs.runner import Interruption, JobResult
from workers.jobs.service import SqlJobs
from workers.ops.sweeps import JobSweep


@pytest.fixture
def sweep(database: Database, recorder: RecordingPublisher) -> JobSweep:
    return JobSweep(database, recorder, AgentSettings(lease_seconds=1))


async def start(
    jobs: SqlJobs, *, restarts: bool = True, args: tuple[Any, ...] = (), task_id: str = "1"
) -> str:
    request = JobRequest(
        plugin_key="tests.jobs", task_type="work", task_id=task_id, chat_key="c", args=args, restarts=restarts
    )
    return (await jobs.start(request)).id


async def row(database: Database, job_id: str) -> Job:
    async with database.read() as tx:
        return await tx.jobs.get(job_id)


async def worker_dies(database: Database) -> None:
    """Make the job's worker look dead and its message old."""
    async with database.begin() as tx:
        await tx.connection.exec_driver_sql(
            "UPDATE jobs SET lease_until = '2000-01-01 00:00:00.000000',"
            " published_at = '2000-01-01 00:00:00.000000'"
        )


async def test_second_delivery_runs_nothing(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    runs = []

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        runs.append(handle.job_id)

    job_id = await start(jobs)
    runner = bench.runner(plugin)
    results = await asyncio.gather(
        *(runner.run(job_id, interruption=shutdown) for _ in range(3)), return_exceptions=True
    )
    assert sorted(type(result).__name__ for result in results) == [
        "DuplicateDelivery", "DuplicateDelivery", "JobResult",
    ]  # fmt: skip
    assert runs == [job_id]
    with pytest.raises(DuplicateDelivery):
        await runner.run(job_id, interruption=shutdown)


async def test_job_of_a_dead_worker_is_published_again_and_the_frozen_one_cannot_write(
    database: Database,
    bench: Bench,
    jobs: SqlJobs,
    plugin: NekroPlugin,
    sweep: JobSweep,
    recorder: RecordingPublisher,
) -> None:
    thaws, finished = asyncio.Event(), []

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> str:
        if len(starts := await_starts) == 0:
            starts.append("first")
            try:
                await thaws.wait()
            except asyncio.CancelledError:
                finished.append("first was stopped")
                raise
        return "second"

    await_starts: list[str] = []
    job_id = await start(jobs)
    first = asyncio.create_task(bench.runner(plugin, name="w1").run(job_id, interruption=shutdown))
    await eventually(lambda: await_starts, what="the first start")
    await worker_dies(database)
    await sweep.sweep()
    assert recorder.jobs == [job_id, job_id]
    result = await bench.runner(plugin, name="w2").run(job_id, interruption=shutdown)
    assert result.state is JobState.SUCCEEDED
    with pytest.raises(DuplicateDelivery):
        await first
    ended = await row(database, job_id)
    assert (ended.data, ended.attempt, ended.worker) == ("second", 2, "w2")
    assert finished == ["first was stopped"]


async def test_job_that_blocks_its_thread_keeps_its_claim(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, released, ahead_seconds = threading.Event(), threading.Event(), 0.0
    monkeypatch.setattr(leases, "elapsed_seconds", lambda: elapsed_seconds() + ahead_seconds)

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        started.set()
        released.wait(WAIT_SECONDS)

    job_id = await start(jobs)
    runner = bench.runner(plugin, lease_seconds=60)

    async def on_its_own_loop() -> JobResult:
        try:
            return await runner.run(job_id, interruption=shutdown)
        finally:
            await database.dispose_loop()

    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, on_its_own_loop()))
    await eventually(started.is_set, what="the job on its own loop")
    before: datetime | None = None

    async def is_renewed() -> bool:
        until = (await row(database, job_id)).lease_until
        return before is not None and until is not None and until > before

    for _ in range(2):
        before = (await row(database, job_id)).lease_until
        ahead_seconds += 20  # until a renewal is due
        await eventually(is_renewed, what="a renewal")
    with pytest.raises(DuplicateDelivery):
        await bench.runner(plugin, name="w2").run(job_id, interruption=shutdown)
    released.set()
    assert (await thread).state is JobState.SUCCEEDED
    assert (await row(database, job_id)).attempt == 1


async def test_job_outlives_an_outage_that_is_longer_than_its_lease(
    database: Database,
    bench: Bench,
    jobs: SqlJobs,
    plugin: NekroPlugin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, renew, is_away = asyncio.Event(), LeaseRepository.renew, True

    async def away(self: LeaseRepository, *args: Any, **options: Any) -> Renewal:
        if is_away:
            raise StorageUnavailableError("the database is unavailable")
        return await renew(self, *args, **options)

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> str:
        await released.wait()
        return "done"

    monkeypatch.setattr(LeaseRepository, "renew", away)
    job_id = await start(jobs)
    running = asyncio.create_task(bench.runner(plugin, lease_seconds=1).run(job_id, interruption=shutdown))

    async def is_over() -> bool:
        until = (await row(database, job_id)).lease_until
        return until is not None and until < datetime.now(UTC)

    await eventually(is_over, what="the end of the lease")
    is_away = False

    async def is_renewed() -> bool:
        return not await is_over()

    await eventually(is_renewed, what="a renewal")
    released.set()
    assert (await running).state is JobState.SUCCEEDED
    ended = await row(database, job_id)
    assert (ended.data, ended.attempt) == ("done", 1)


async def test_job_that_must_not_restart_fails_and_wakes_the_agent_once(
    database: Database, jobs: SqlJobs, sweep: JobSweep, recorder: RecordingPublisher
) -> None:
    job_id = await start(jobs, restarts=False)
    async with database.begin() as tx:
        assert await tx.jobs.claim(job_id, worker="w1", lease_seconds=30)
    await worker_dies(database)
    await asyncio.gather(sweep.sweep(), sweep.sweep())
    ended = await row(database, job_id)
    assert ended.state is JobState.FAILED and "does not restart" in ended.message
    async with database.read() as tx:
        messages = await tx.messages.newest("c", limit=9)
        rounds = await tx.rounds.newest("c", limit=9)
    assert [message.text for message in messages] == [f"Background task work '1' failed: {ended.message}"]
    assert [round_.trigger_id for round_ in rounds] == [job_id]
    assert (recorder.rounds, recorder.jobs) == (["c"], [job_id])


async def test_job_that_kills_its_workers_is_given_up(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin, sweep: JobSweep
) -> None:
    job_id = await start(jobs)
    for _ in range(MAX_DEATHS):
        async with database.begin() as tx:
            assert await tx.jobs.claim(job_id, worker="w1", lease_seconds=30)
        await worker_dies(database)
    async with database.begin() as tx:
        assert await tx.jobs.claim(job_id, worker="w1", lease_seconds=30) is None
    await sweep.sweep()
    ended = await row(database, job_id)
    assert ended.state is JobState.FAILED and f"died {MAX_DEATHS} times" in ended.message


async def test_job_of_a_dead_worker_that_was_asked_to_stop_is_not_restarted(
    database: Database, jobs: SqlJobs, sweep: JobSweep, recorder: RecordingPublisher
) -> None:
    job_id = await start(jobs)
    async with database.begin() as tx:
        await tx.jobs.claim(job_id, worker="w1", lease_seconds=30)
    assert await jobs.cancel(job_id)
    await worker_dies(database)
    await sweep.sweep()
    assert (await row(database, job_id)).state is JobState.CANCELLED
    assert recorder.jobs == [job_id]


async def test_lost_message_is_published_again_and_a_young_one_is_not(
    database: Database, jobs: SqlJobs, sweep: JobSweep, recorder: RecordingPublisher
) -> None:
    job_id = await start(jobs)
    await sweep.sweep()
    assert recorder.jobs == [job_id]
    await worker_dies(database)
    await sweep.sweep()
    await sweep.sweep()
    assert recorder.jobs == [job_id, job_id]


async def test_messages_of_queued_jobs_are_published_again_only_if_one_is_missing(
    database: Database, background: BackgroundLoop, app: NekroApp, client: redis.Redis
) -> None:
    publisher = EventPublisher(app)
    jobs, queue = SqlJobs(database, background, publisher), f"{app.nekro_settings.broker.key_prefix}long"
    for number in range(3):
        await start(jobs, task_id=str(number))
    sweep = JobSweep(database, publisher, AgentSettings(lease_seconds=1))
    for _ in range(3):
        await worker_dies(database)
        await sweep.sweep()
    assert client.llen(queue) == 3
    client.rpop(queue)
    for _ in range(3):
        await worker_dies(database)
        await sweep.sweep()
    assert client.llen(queue) == 5
    client.delete(queue)
    await worker_dies(database)
    await sweep.sweep()
    assert client.llen(queue) == 3
    await publisher.close()


async def test_job_cancelled_in_the_queue_does_not_run(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    job_id = await start(jobs)
    jobs.notify(job_id, "early", 1)
    assert await jobs.cancel(job_id) is True
    assert await jobs.cancel(job_id) is False
    with pytest.raises(DuplicateDelivery):
        await bench.runner(plugin).run(job_id, interruption=shutdown)
    with pytest.raises(ConflictError, match="has ended"):
        await jobs.wait(job_id, "early", timeout_seconds=None)
    with pytest.raises(NotFoundError):
        await jobs.cancel("unknown")


async def test_a_stop_reaches_a_job_in_the_moment_in_which_a_time_limit_of_its_own_ends(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    begun = asyncio.Event()

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        begun.set()
        while True:  # nearly always a time limit has just cancelled the task
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()

    for _ in range(5):
        job_id = await start(jobs)
        running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=shutdown))
        await begun.wait()
        begun.clear()
        assert await jobs.cancel(job_id)
        async with asyncio.timeout(WAIT_SECONDS):
            await running
        assert (await row(database, job_id)).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("why", "state", "message"),
    [
        (Interruption.TIME_LIMIT, JobState.FAILED, "time limit"),
        (Interruption.REVOKED, JobState.CANCELLED, "revoked"),
    ],
)
async def test_interrupted_job_ends_with_the_reason(
    database: Database,
    bench: Bench,
    jobs: SqlJobs,
    plugin: NekroPlugin,
    why: Interruption,
    state: JobState,
    message: str,
) -> None:
    cleaned = await _interrupt(database, bench, jobs, plugin, why)
    ended = await row(database, (await _newest(database)).id)
    assert ended.state is state and message in ended.message
    assert cleaned == ["cleaned"]


async def test_job_of_a_stopping_worker_is_released_at_once(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    await _interrupt(database, bench, jobs, plugin, Interruption.SHUTDOWN)
    job = await _newest(database)
    assert job.state is JobState.RUNNING

    async def is_free() -> bool:
        async with database.begin() as tx:
            return await tx.jobs.claim(job.id, worker="w2", lease_seconds=30) is not None

    await eventually(is_free, what="the lease to end")


async def test_job_whose_workers_stop_is_started_again_however_often(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin, sweep: JobSweep
) -> None:
    starts: list[int] = []

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        starts.append(len(starts))
        if len(starts) <= MAX_DEATHS:
            await asyncio.Event().wait()

    job_id = await start(jobs)
    for number in range(MAX_DEATHS):
        running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=shutdown))
        await eventually(lambda count=number + 1: len(starts) == count, what="the job to start")
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await worker_dies(database)  # the lease that it released is over
        await sweep.sweep()
    assert (await bench.runner(plugin).run(job_id, interruption=shutdown)).state is JobState.SUCCEEDED
    assert (await row(database, job_id)).attempt == MAX_DEATHS + 1


async def test_job_that_kills_its_workers_is_given_up_although_others_stopped(
    database: Database, jobs: SqlJobs, sweep: JobSweep
) -> None:
    job_id = await start(jobs)
    for number in range(MAX_DEATHS + 2):
        async with database.begin() as tx:
            job = await tx.jobs.claim(job_id, worker="w1", lease_seconds=30)
            assert job is not None
            if number < 2:
                await tx.jobs.release(job_id, fence=job.fence)
        await worker_dies(database)
    await sweep.sweep()
    ended = await row(database, job_id)
    assert ended.state is JobState.FAILED and f"died {MAX_DEATHS} times" in ended.message


async def test_job_of_a_plugin_that_the_worker_lacks_fails(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    job_id = await start(jobs)
    with pytest.raises(MethodFailedError, match="no task type 'work'"):
        await bench.runner(plugin).run(job_id, interruption=shutdown)
    assert (await row(database, job_id)).state is JobState.FAILED
    other = await start(jobs)
    with pytest.raises(MethodFailedError, match=r"not loaded plugin tests\.jobs"):
        await bench.runner().run(other, interruption=shutdown)


async def chat_of(database: Database) -> tuple[list[str], list[str]]:
    """The texts and the triggers of rounds in the jobs' chat."""
    async with database.read() as tx:
        messages = await tx.messages.newest("c", limit=9)
        rounds = await tx.rounds.newest("c", limit=9)
    return [message.text for message in messages], [round_.trigger_id for round_ in rounds]


@pytest.mark.parametrize("how", ["raise", "declare"])
async def test_a_failed_job_notifies_its_chat_and_wakes_the_agent(
    database: Database,
    bench: Bench,
    jobs: SqlJobs,
    plugin: NekroPlugin,
    recorder: RecordingPublisher,
    how: str,
) -> None:
    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> AsyncIterator[TaskCtl]:
        if how == "raise":
            raise ValueError("the key is s3cret-value")
        yield TaskCtl.fail("the key is s3cret-value")

    job_id = await start(jobs)
    with pytest.raises(MethodFailedError):
        await bench.runner(plugin).run(job_id, interruption=shutdown)
    reason = "ValueError: the key is [secret]" if how == "raise" else "the key is [secret]"
    assert await chat_of(database) == ([f"Background task work '1' failed: {reason}"], [job_id])
    assert recorder.rounds == ["c"]


async def test_a_job_that_ended_otherwise_sends_its_chat_nothing(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle, how: str) -> AsyncIterator[TaskCtl]:
        if how == "asked":
            async with database.begin() as tx:
                await tx.jobs.request_cancel(handle.job_id, reason="by the test")
            raise ValueError("cannot continue without it")
        yield TaskCtl.cancel("no need") if how == "cancel" else TaskCtl.success("done")

    for how in ("succeed", "cancel", "asked"):
        job_id = await start(jobs, args=(how,))
        try:
            await bench.runner(plugin).run(job_id, interruption=shutdown)
        except MethodFailedError:
            assert how == "asked"
    assert await chat_of(database) == ([], [])


async def test_a_failure_that_the_job_reported_is_not_reported_again(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle, how: str) -> AsyncIterator[TaskCtl]:
        handle.has_notified_agent = True  # as ``notify_agent`` does, which needs a whole runtime
        if how == "raise":
            raise ValueError("later")
        yield TaskCtl.fail("reported")

    for how in ("declare", "raise"):
        with pytest.raises(MethodFailedError):
            await bench.runner(plugin).run(await start(jobs, args=(how,)), interruption=shutdown)
    texts, _ = await chat_of(database)
    assert texts == ["Background task work '1' failed: ValueError: later"]


async def test_failure_is_redacted_and_aborts_are_failures(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle, how: str) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        raise ValueError("the key is s3cret-value")

    job_id = await start(jobs, args=("secret",))
    with pytest.raises(MethodFailedError):
        await bench.runner(plugin).run(job_id, interruption=shutdown)
    ended = await row(database, job_id)
    assert "s3cret" not in ended.message + str(ended.data) and "ValueError" in ended.message
    aborted = await start(jobs, args=("interrupt",))
    with pytest.raises(MethodFailedError, match="KeyboardInterrupt"):
        await bench.runner(plugin).run(aborted, interruption=shutdown)


async def test_of_frequent_reports_the_newest_is_stored(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    released = asyncio.Event()

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> AsyncIterator[TaskCtl]:
        for percent in range(100):
            yield TaskCtl.report_progress(f"at {percent}", percent)
        await released.wait()
        yield TaskCtl.success("done", data=object())

    job_id = await start(jobs)
    running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=shutdown))

    async def is_at_99() -> bool:
        return (job_id, 99, "at 99") in bench.announced

    await eventually(is_at_99, what="99 percent")
    assert (await row(database, job_id)).percent == 99
    released.set()
    await running
    assert bench.announced[-1] == (job_id, 99, "at 99") and len(bench.announced) < 50
    assert str((await row(database, job_id)).data).startswith("<object object")


async def test_unencodable_arguments_are_refused_at_the_start(jobs: SqlJobs, database: Database) -> None:
    with pytest.raises(ArgumentError, match="background job"):
        await start(jobs, args=(threading.Lock(),))
    with pytest.raises(ArgumentError, match="at most"):
        await start(jobs, args=(b"x" * (9 << 20),))
    async with database.read() as tx:
        assert await tx.jobs.newest(limit=1) == []


async def test_notify_inside_a_transaction_of_the_same_loop_does_not_deadlock(
    database: Database, jobs: SqlJobs
) -> None:
    job_id = await start(jobs)
    async with database.begin():
        assert jobs.notify(job_id, "k", "kept")
        assert jobs.peek("tests.jobs", "work", "1") is not None
    assert await jobs.wait(job_id, "k", timeout_seconds=WAIT_SECONDS) == "kept"


async def test_second_wait_replaces_the_first(jobs: SqlJobs, database: Database) -> None:
    job_id = await start(jobs)
    first = asyncio.create_task(jobs.wait(job_id, "k", timeout_seconds=WAIT_SECONDS))

    async def is_waiting() -> bool:
        async with database.read() as tx:
            return bool(await tx.job_signals.waiting_keys(job_id))

    await eventually(is_waiting, what="the wait for the signal")
    second = asyncio.create_task(jobs.wait(job_id, "k", timeout_seconds=WAIT_SECONDS))
    with pytest.raises(asyncio.CancelledError):
        await first
    jobs.notify(job_id, "k", 1)
    assert await second == 1
    assert jobs.cancel_wait(job_id) == 0


@pytest.mark.parametrize("why", [Interruption.TIME_LIMIT, Interruption.REVOKED])
async def test_the_end_of_a_stopped_job_is_recorded_after_its_cleanup(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin, why: Interruption,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(runner_module, "CANCEL_SECONDS", 0.01)  # a stopping worker would not wait for it
    started, states = asyncio.Event(), []

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            states.append((await row(database, handle.job_id)).state)

    job_id = await start(jobs)
    running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=lambda: why))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert states == [JobState.RUNNING]
    assert (await row(database, job_id)).state.is_final


async def test_the_hard_limit_ends_the_wait_for_a_cleanup_and_not_the_record(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    started, is_cleaning, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    reasons = iter([Interruption.TIME_LIMIT, Interruption.SHUTDOWN])

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cleaning.set()
            await may_end.wait()

    job_id = await start(jobs)
    running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=lambda: next(reasons)))
    await started.wait()
    running.cancel()
    await is_cleaning.wait()
    async with database.begin() as tx:  # keeps the end from being recorded
        await tx.connection.exec_driver_sql("UPDATE jobs SET message = message")
        for _ in range(3):
            running.cancel()
            await asyncio.sleep(0.05)
        assert not running.done()
    with pytest.raises(asyncio.CancelledError):
        await running
    ended = await row(database, job_id)
    assert (ended.state, ended.message) == (JobState.FAILED, "stopped at the time limit of lane long")
    may_end.set()


async def test_a_stop_while_the_end_of_a_job_is_recorded_does_not_start_it_again(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    started, may_end = asyncio.Event(), asyncio.Event()

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> str:
        started.set()
        await may_end.wait()
        return "done"

    job_id = await start(jobs)
    running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=shutdown))
    await started.wait()
    async with database.begin() as tx:  # keeps the end from being recorded
        await tx.connection.exec_driver_sql("UPDATE jobs SET message = message")
        may_end.set()
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running
    ended = await row(database, job_id)
    assert (ended.state, ended.data) == (JobState.SUCCEEDED, "done")


async def _newest(database: Database) -> Job:
    async with database.read() as tx:
        (job,) = await tx.jobs.newest(limit=1)
    return job


async def _interrupt(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin, why: Interruption
) -> list[str]:
    started, cleaned = asyncio.Event(), []

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("cleaned")

    job_id = await start(jobs)
    running = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=lambda: why))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    return cleaned
