"""What timers and recurring timers promise to plugins, checked on each implementation."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nekro_agent.ports import CronJob, CronJobs, Timers, WorkdayMode
from storage.engine import Database
from storage.timer_services import Firing, SqlCronJobs, SqlTimers
from storage.transaction import Transaction

SOON = datetime(2040, 1, 1, tzinfo=UTC)
LATER = SOON + timedelta(hours=1)


@dataclass
class Services:
    """One implementation; ``fired`` records the timers that ``run_now`` fired."""

    timers: Timers
    cron_jobs: CronJobs
    fired: list[str]


@pytest.fixture(params=["sqlite", "postgres"])
async def services(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Services]:
    fired: list[str] = []
    database = Database(request.getfixturevalue("migrated_copy")(request.param), tmp_path)

    async def on_fire(tx: Transaction, firing: Firing) -> None:
        tx.after_commit(lambda: _note(fired, firing.text))

    yield Services(SqlTimers(database), SqlCronJobs(database, on_fire=on_fire), fired)
    await database.dispose()


async def _note(fired: list[str], text: str) -> None:
    fired.append(text)


async def test_a_timer_is_deleted_once_by_its_id(services: Services) -> None:
    gone = await services.timers.add("c", fire_at=SOON, description="gone", temporary=False)
    kept = await services.timers.add("c", fire_at=SOON, description="kept", temporary=True)
    deleted = [await services.timers.delete(timer_id) for timer_id in (gone.id, gone.id, "x")]
    assert deleted == [True, False, False]
    assert await services.timers.pending("c") == [kept]


async def test_pending_timers_are_listed_soonest_first(services: Services) -> None:
    late = await services.timers.add("c", fire_at=LATER, description="late", temporary=False)
    soon = await services.timers.add("c", fire_at=SOON, description="soon", temporary=False)
    await services.timers.add("other", fire_at=SOON, description="elsewhere", temporary=False)
    assert await services.timers.pending("c") == [soon, late]
    assert (soon.chat_key, soon.fire_at, soon.description) == ("c", SOON, "soon")
    assert await services.timers.pending("nobody") == []


async def test_temporary_timer_replaces_only_the_chat_s_other_temporary_one(services: Services) -> None:
    await services.timers.add("c", fire_at=SOON, description="kept", temporary=False)
    await services.timers.add("other", fire_at=SOON, description="elsewhere", temporary=True)
    await asyncio.gather(
        *(services.timers.add("c", fire_at=LATER, description="t", temporary=True) for _ in range(5))
    )
    assert [timer.temporary for timer in await services.timers.pending("c")] == [False, True]
    assert len(await services.timers.pending("other")) == 1


async def test_clear_cancels_temporary_or_all_timers_of_a_chat(services: Services) -> None:
    for temporary in (True, False):
        await services.timers.add("c", fire_at=SOON, description="x", temporary=temporary)
    assert await services.timers.clear("c", temporary=True) == 1
    assert await services.timers.clear("c", temporary=True) == 0
    assert await services.timers.clear("c") == 1
    assert await services.timers.pending("c") == []


def _job(job_id: str = "job1", *, created_at: datetime = SOON) -> CronJob:
    return CronJob(
        job_id=job_id,
        chat_key="c",
        cron_expr="0 9 * * *",
        timezone="Asia/Tokyo",
        workday_mode=WorkdayMode.NONE,
        title="T",
        event_desc="greet",
        next_fire_at=LATER,
        last_fired_at=None,
        created_at=created_at,
        updated_at=created_at,
    )


async def test_job_is_stored_and_an_existing_id_refused(services: Services) -> None:
    assert await services.cron_jobs.add(_job())
    assert not await services.cron_jobs.add(dataclasses.replace(_job(), event_desc="another"))
    assert await services.cron_jobs.get("job1") == _job()
    assert await services.cron_jobs.get("job2") is None


async def test_jobs_of_a_chat_are_listed_oldest_first(services: Services) -> None:
    await services.cron_jobs.add(_job("bbbb"))
    await services.cron_jobs.add(_job("aaaa", created_at=LATER))
    assert [job.job_id for job in await services.cron_jobs.of_chat("c")] == ["bbbb", "aaaa"]
    assert await services.cron_jobs.of_chat("other") == []


async def test_replace_keeps_the_creation_and_firing_times(services: Services) -> None:
    await services.cron_jobs.add(_job())
    changed = dataclasses.replace(
        _job(created_at=LATER), title=None, next_fire_at=None, last_fired_at=LATER, event_desc="new"
    )
    assert await services.cron_jobs.replace(changed)
    assert await services.cron_jobs.get("job1") == dataclasses.replace(
        changed, created_at=SOON, last_fired_at=None
    )
    assert not await services.cron_jobs.replace(_job("job2"))


async def test_run_now_fires_once_and_keeps_the_schedule(services: Services) -> None:
    await services.cron_jobs.add(_job())
    assert await services.cron_jobs.run_now("job1")
    assert services.fired == ["greet"]
    assert await services.cron_jobs.get("job1") == _job()
    assert not await services.cron_jobs.run_now("job2")


async def test_deleted_job_does_not_exist(services: Services) -> None:
    await services.cron_jobs.add(_job())
    assert await services.cron_jobs.delete("job1")
    assert not await services.cron_jobs.delete("job1")
    assert not await services.cron_jobs.run_now("job1")
    assert services.fired == []
