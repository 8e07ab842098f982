"""The log of a background job: what happened to it, with bounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from nekro_agent.errors import FencedError
from storage.engine import Database
from storage.repositories.job_log import MOST_CHARS, MOST_ENTRIES
from storage.repositories.jobs import Job, NewJob
from storage.states import CrashPolicy, JobState

RunOut = Callable[[], Awaitable[None]]


async def add(database: Database, *, args: object = (), on_crash: CrashPolicy = CrashPolicy.RESTART) -> Job:
    packed = None if args is None else {"arguments": []}
    new = NewJob(type="bake", task_id="t", plugin_key="a.b", chat_key="chat", args=packed, on_crash=on_crash)
    async with database.begin() as tx:
        return await tx.jobs.add(new)


async def claim(database: Database, job: Job, worker: str) -> Job:
    async with database.begin() as tx:
        claimed = await tx.jobs.claim(job.id, worker=worker, lease_seconds=60)
    assert claimed is not None
    return claimed


async def log_of(database: Database, job: Job) -> list[tuple[object, ...]]:
    async with database.read() as tx:
        entries = await tx.job_log.of_job(job.id)
    assert [one.number for one in entries] == sorted({one.number for one in entries})
    return [
        (one.kind.value, one.attempt, one.worker or one.percent or one.level, one.text) for one in entries
    ]


async def test_attempts_reports_lines_and_the_end_are_recorded(
    database: Database, let_leases_run_out: RunOut
) -> None:
    job = await add(database)
    await claim(database, job, "w1")
    await let_leases_run_out()
    second = await claim(database, job, "w2")
    async with database.begin() as tx:
        await tx.jobs.progress(
            job.id, fence=second.fence, percent=40, message="secret dough", logged_as="dough"
        )
        await tx.jobs.progress(job.id, fence=second.fence, percent=41, message="not logged")
        await tx.jobs.log(job.id, ("INFO", "kneads"), ("WARNING", "sticky"), fence=second.fence)
        await tx.jobs.release(job.id, fence=second.fence)
    third = await claim(database, job, "w3")
    async with database.begin() as tx:
        await tx.jobs.request_cancel(job.id, reason="enough")
        await tx.jobs.finish(job.id, fence=third.fence, state=JobState.CANCELLED, message="stopped")
    assert await log_of(database, job) == [
        ("started", 1, "w1", ""),
        ("started", 2, "w2", ""),
        ("report", 2, 40, "dough"),
        ("line", 2, "INFO", "kneads"),
        ("line", 2, "WARNING", "sticky"),
        ("released", 2, None, ""),
        ("started", 3, "w3", ""),
        ("cancel_requested", 3, None, "enough"),
        ("cancelled", 3, None, "stopped"),
    ]
    with pytest.raises(FencedError):
        async with database.begin() as tx:
            await tx.jobs.log(job.id, ("INFO", "late"), fence=third.fence)


async def test_the_death_of_the_worker_of_a_job_that_does_not_restart_ends_its_log(
    database: Database, let_leases_run_out: RunOut
) -> None:
    job = await add(database, on_crash=CrashPolicy.FAIL)
    await claim(database, job, "w1")
    await let_leases_run_out()
    async with database.begin() as tx:
        await tx.jobs.fail_orphans(limit=9)
    assert await log_of(database, job) == [
        ("started", 1, "w1", ""),
        ("failed", 1, None, "its worker died, and the job does not restart"),
    ]


async def test_entries_and_their_texts_are_bounded_and_starts_stay(database: Database) -> None:
    job = await add(database)
    fence = (await claim(database, job, "w1")).fence
    async with database.begin() as tx:
        for number in range(4):
            lines = [("INFO", f"{number}-{place}" + "x" * 2000) for place in range(100)]
            await tx.jobs.log(job.id, *lines, fence=fence)
    found = await log_of(database, job)
    assert found[0] == ("started", 1, "w1", "")
    assert len(found) == MOST_ENTRIES + 1
    assert str(found[1][3]).startswith("1-0x") and len(str(found[1][3])) == MOST_CHARS


async def test_calls_that_are_shown_as_jobs_have_no_log(database: Database) -> None:
    job = await add(database, args=None)
    async with database.begin() as tx:
        await tx.jobs.request_cancel(job.id, reason="enough")
    assert await log_of(database, job) == []
