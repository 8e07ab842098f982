"""Background jobs: one run at a time, taken over after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import eventually

from nekro_agent.errors import ConflictError, FencedError, NotFoundError
from storage.engine import Database
from storage.repositories.jobs import JOB_CLAIMS, Job, NewJob
from storage.states import CrashPolicy, JobState

RunOut = Callable[[], Awaitable[None]]


def _new(task_id: str = "t1", **values: Any) -> NewJob:
    return NewJob(type="download", task_id=task_id, plugin_key="a.b", chat_key="chat", **values)


async def _add(database: Database, job: NewJob) -> Job:
    async with database.begin() as tx:
        return await tx.jobs.add(job)


async def _claim(database: Database, job_id: str, worker: str = "w1") -> Job | None:
    async with database.begin() as tx:
        return await tx.jobs.claim(job_id, worker=worker, lease_seconds=60)


async def test_job_goes_from_waiting_to_success(database: Database) -> None:
    added = await _add(database, _new(args={"args": [1], "kwargs": {}}))
    assert (added.state, added.percent, added.args) == (JobState.QUEUED, 0, {"args": [1], "kwargs": {}})
    running = await _claim(database, added.id)
    assert running is not None and (running.state, running.fence, running.attempt) == (JobState.RUNNING, 1, 1)
    async with database.begin() as tx:
        half = await tx.jobs.progress(added.id, fence=1, percent=150, message="half", data={"rate": 1})
        assert (half.percent, half.message, half.data) == (100, "half", {"rate": 1})
        low = await tx.jobs.progress(added.id, fence=1, percent=-3, message="low")
        assert (low.percent, low.data) == (0, {"rate": 1})
        done = await tx.jobs.finish(added.id, fence=1, state=JobState.SUCCEEDED, message="here")
    assert (done.state, done.percent, done.message, done.data) == (
        JobState.SUCCEEDED, 100, "here", {"rate": 1},
    )  # fmt: skip
    assert done.finished_at is not None
    async with database.read() as tx:
        assert await tx.jobs.get(added.id) == done
        assert await tx.jobs.newest(limit=5, open_only=True) == []
        assert await tx.jobs.newest(limit=5, chat_key="chat") == [done]


async def test_one_worker_of_many_gets_the_job(database: Database) -> None:
    job = await _add(database, _new())
    claims = await asyncio.gather(*(_claim(database, job.id, f"w{n}") for n in range(8)))
    assert sum(claim is not None for claim in claims) == 1


async def test_task_id_has_one_open_job_and_may_be_used_again_afterwards(database: Database) -> None:
    first = await _add(database, _new())
    with pytest.raises(ConflictError):
        await _add(database, _new())
    async with database.begin() as tx:
        cancelled = await tx.jobs.request_cancel(first.id, reason="not needed")
    assert (cancelled.state, cancelled.message) == (JobState.CANCELLED, "not needed")
    second = await _add(database, _new())
    async with database.read() as tx:
        assert await tx.jobs.find_latest("a.b", "download", "t1") == second
        assert await tx.jobs.find_latest("a.c", "download", "t1") is None


async def test_job_of_a_dead_worker_is_restarted_and_the_dead_one_cannot_write(
    database: Database, let_leases_run_out: RunOut
) -> None:
    job = await _add(database, _new())
    await _claim(database, job.id)
    await let_leases_run_out()
    async with database.begin() as tx:
        assert await tx.jobs.take_orphans(waiting_seconds=60, limit=9) == []  # published a moment ago
        assert [o.id for o in await tx.jobs.take_orphans(waiting_seconds=-1, limit=9)] == [job.id]
        assert await tx.jobs.fail_orphans(limit=9) == []
    again = await _claim(database, job.id, "w2")
    assert again is not None and (again.fence, again.attempt) == (2, 2)
    with pytest.raises(FencedError, match="claim 1"):
        async with database.begin() as tx:
            await tx.jobs.progress(job.id, fence=1, percent=50, message="late")
    async with database.autocommit() as tx:
        renewal = await tx.leases.renew(JOB_CLAIMS, [(job.id, 1), (job.id, 2)], lease_seconds=60)
    assert (renewal.kept, renewal.lost) == ({(job.id, 2)}, {(job.id, 1)})


async def test_a_late_renewal_does_not_keep_a_job_that_starts_again(database: Database) -> None:
    job = await _add(database, _new())
    for fence in (1, 2):
        assert await _claim(database, job.id) is not None
        async with database.begin() as tx:
            assert await tx.jobs.restart(job.id, fence=fence, message="again")
        async with database.autocommit() as tx:
            renewal = await tx.leases.renew(JOB_CLAIMS, [(job.id, fence)], lease_seconds=60)
        assert renewal.lost == {(job.id, fence)}
    last = await _claim(database, job.id)
    assert last is not None
    async with database.begin() as tx:
        assert not await tx.jobs.restart(job.id, fence=last.fence, message="again")


async def test_released_job_is_free_at_once_and_a_late_renewal_does_not_keep_it(database: Database) -> None:
    job = await _add(database, _new())
    await _claim(database, job.id)
    async with database.autocommit() as tx:
        await tx.jobs.release(job.id, fence=1)
        renewal = await tx.leases.renew(JOB_CLAIMS, [(job.id, 1)], lease_seconds=60)
    assert renewal.lost == {(job.id, 1)}

    async def is_free() -> bool:
        return await _claim(database, job.id, "w2") is not None

    await eventually(is_free, what="the clock of the database to pass the end of the lease")


async def test_job_that_must_not_restart_fails_when_its_worker_dies(
    database: Database, let_leases_run_out: RunOut
) -> None:
    job = await _add(database, _new(on_crash=CrashPolicy.FAIL))
    await _claim(database, job.id)
    await let_leases_run_out()
    assert await _claim(database, job.id, "w2") is None
    async with database.begin() as tx:
        assert await tx.jobs.take_orphans(waiting_seconds=-1, limit=9) == []
        (failed,) = await tx.jobs.fail_orphans(limit=9)
    assert failed.state is JobState.FAILED and "worker died" in failed.message


async def test_unclaimed_job_is_published_again(database: Database) -> None:
    job = await _add(database, _new())
    async with database.begin() as tx:
        assert await tx.jobs.take_orphans(waiting_seconds=60, limit=9) == []
        assert [o.id for o in await tx.jobs.take_orphans(waiting_seconds=-1, limit=9)] == [job.id]


async def test_running_job_is_requested_to_stop_and_chooses_its_end(database: Database) -> None:
    job = await _add(database, _new())
    await _claim(database, job.id)
    async with database.begin() as tx:
        asked = await tx.jobs.request_cancel(job.id, reason="x")
        assert asked.state is JobState.RUNNING
        assert await tx.jobs.stop_requests([(job.id, 1), (job.id, 2)]) == {(job.id, 1): True}
        ended = await tx.jobs.finish(job.id, fence=1, state=JobState.CANCELLED, message="stopped")
        assert await tx.jobs.request_cancel(job.id, reason="again") == ended
        with pytest.raises(FencedError):
            await tx.jobs.finish(job.id, fence=1, state=JobState.SUCCEEDED, message="no")


async def test_job_cannot_finish_as_open_and_missing_jobs_are_named(database: Database) -> None:
    async with database.begin() as tx:
        with pytest.raises(ValueError, match="running"):
            await tx.jobs.finish("j", fence=1, state=JobState.RUNNING, message="")
        with pytest.raises(NotFoundError, match="job 'j'"):
            await tx.jobs.request_cancel("j", reason="")
        assert await tx.jobs.find("j") is None
