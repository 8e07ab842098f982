"""What a job logs and reports while it runs is in its log, redacted, whatever ends it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from runtime_bench import Bench, shutdown
from waiting import eventually

from nekro.operations.work import attempts_of
from nekro_agent.api.core import logger
from nekro_agent.api.plugin import NekroPlugin, TaskCtl
from nekro_agent.errors import MethodFailedError
from nekro_agent.jobs import AsyncTaskHandle
from nekro_agent.ports import JobRequest
from storage.engine import Database
from storage.repositories.job_log import JobLogEntry
from storage.states import JobLogKind
from workers.jobs.service import SqlJobs


async def start(jobs: SqlJobs) -> str:
    request = JobRequest(plugin_key="tests.jobs", task_type="work", task_id="1", chat_key="c")
    return (await jobs.start(request)).id


async def log_of(database: Database, job_id: str) -> list[JobLogEntry]:
    async with database.read() as tx:
        return [*await tx.job_log.of_job(job_id)]


async def test_lines_and_reports_are_kept_while_it_runs_and_when_it_fails(
    database: Database, bench: Bench, jobs: SqlJobs, plugin: NekroPlugin
) -> None:
    goes_on = asyncio.Event()

    @plugin.mount_async_task("work")
    async def work(handle: AsyncTaskHandle):  # type: ignore[no-untyped-def]
        logger.info("the oven is on, http://cook:hunter2@oven")
        logger.debug("not kept")
        yield TaskCtl.report_progress("half at http://cook:hunter2@oven", 50)
        await goes_on.wait()
        logger.warning("smoke")
        raise ValueError("burnt")

    logger.info("of no job")
    job_id = await start(jobs)
    run = asyncio.create_task(bench.runner(plugin).run(job_id, interruption=shutdown))

    async def has_report() -> bool:
        return any(entry.kind is JobLogKind.REPORT for entry in await log_of(database, job_id))

    await eventually(has_report, what="the report")
    goes_on.set()
    with pytest.raises(MethodFailedError):
        await run
    found = await log_of(database, job_id)
    texts = [(one.kind.value, one.level or one.percent, one.text) for one in found]
    assert texts[:3] == [
        ("started", None, ""),
        ("line", "INFO", "the oven is on, http://cook:[secret]@oven"),
        ("report", 50, "half at http://cook:[secret]@oven"),
    ]
    assert ("line", "WARNING", "smoke") in texts
    assert texts[-1][0] == "failed" and "burnt" in texts[-1][2]
    assert not any("not kept" in text or "of no job" in text for _, _, text in texts)


def test_an_attempt_that_another_one_follows_was_lost_with_its_worker() -> None:
    begin = datetime(2026, 5, 4, tzinfo=UTC)
    kinds = [
        (JobLogKind.STARTED, 1), (JobLogKind.REPORT, 1), (JobLogKind.STARTED, 2), (JobLogKind.RELEASED, 2),
        (JobLogKind.CANCEL_REQUESTED, 2), (JobLogKind.STARTED, 3),
    ]  # fmt: skip
    entries = [
        JobLogEntry(
            kind=kind, attempt=attempt, worker=f"w{attempt}", text="", number=place,
            at=begin + timedelta(seconds=place),
        )
        for place, (kind, attempt) in enumerate(kinds)
    ]  # fmt: skip
    lost, released, running = attempts_of(entries)
    assert (lost.outcome, lost.ended_at, lost.last_at) == ("lost", None, begin + timedelta(seconds=1))
    assert (released.outcome, released.ended_at) == ("released", begin + timedelta(seconds=3))
    assert (running.outcome, running.worker, running.ended_at) == ("running", "w3", None)
