"""Timers fire once across the fleet, late rather than never."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from runtime_bench import RecordingPublisher
from sqlalchemy import update
from waiting import WAIT_SECONDS

from broker_config.settings import AgentSettings, DatabaseSettings, RetentionSettings
from nekro.app.background import BackgroundLoop
from nekro.app.calls.detached import CallDetacher
from nekro.app.chats.writer import TimerFirings
from nekro.app.leases import LeaseKeeper
from nekro.plugins.entries import MethodEntry
from nekro.wire.invocation import Invocation, new_id
from nekro_agent import shared_clock
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.methods import Lane, SandboxMethodType
from nekro_agent.ports import CronJob, JobState, WorkdayMode
from nekro_agent.shared_clock import Reading, SharedClock, elapsed_seconds
from storage.engine import Database
from storage.repositories.jobs import NewJob
from storage.states import TriggerKind
from storage.tables import CALLS
from storage.timer_services import SqlCronJobs, SqlTimers
from workers.ops.sweeper import Sweeper
from workers.ops.sweeps import RetentionSweep, TimerSweep

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


def cron_job(**changes: object) -> CronJob:
    job = CronJob(
        job_id="abcd",
        chat_key="c",
        cron_expr="0 9 * * *",
        timezone="Asia/Tokyo",
        workday_mode=WorkdayMode.MON_FRI,
        title=None,
        event_desc="drink tea",
        next_fire_at=LONG_AGO,
        last_fired_at=None,
        created_at=LONG_AGO,
        updated_at=LONG_AGO,
    )
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


async def history(database: Database, chat_key: str = "c") -> list[str]:
    async with database.read() as tx:
        return [message.text for message in await tx.messages.newest(chat_key, limit=99)]


async def test_two_sweepers_fire_each_timer_once(
    database: Database, kind_settings: DatabaseSettings, tmp_path: Path, recorder: RecordingPublisher
) -> None:
    timers = SqlTimers(database)
    for number in range(12):
        await timers.add(f"c{number % 3}", fire_at=LONG_AGO, description=str(number), temporary=False)
    other = Database(kind_settings, tmp_path)
    sweeps = [TimerSweep(each, TimerFirings(recorder)) for each in (database, other)]
    await asyncio.gather(*(sweep.sweep() for sweep in sweeps))
    await other.dispose()
    texts = [text for number in range(3) for text in await history(database, f"c{number}")]
    assert sorted(texts, key=int) == [str(number) for number in range(12)]
    async with database.read() as tx:
        rounds = await tx.rounds.newest("c0", limit=99)
    assert [round_.trigger_kind for round_ in rounds] == [TriggerKind.TIMER] * 4
    assert sorted(recorder.rounds) == sorted([f"c{number}" for number in range(3)] * 4)
    async with database.read() as tx:
        events = [event.type for event in await tx.events.after("c0", number=0, limit=99)]
    assert sorted(events) == ["message.noted"] * 4 + ["turn.started"] * 4
    assert sorted(recorder.events) == sorted(
        f"c{chat} {2 * number}" for chat in range(3) for number in (1, 2, 3, 4)
    )


async def test_missed_times_fire_once_and_late(database: Database, recorder: RecordingPublisher) -> None:
    await SqlCronJobs(database, on_fire=TimerFirings(recorder).fire).add(cron_job())
    sweep = TimerSweep(database, TimerFirings(recorder))
    pause = await sweep.sweep()
    await sweep.sweep()
    assert await history(database) == ["drink tea"]
    async with database.read() as tx:
        job = await tx.cron_jobs.find("abcd")
    assert job is not None and job.next_fire_at is not None and job.last_fired_at == LONG_AGO
    assert job.next_fire_at > datetime.now(UTC) and (job.next_fire_at.hour, job.next_fire_at.minute) == (0, 0)
    assert job.next_fire_at.weekday() < 5
    assert pause is not None and 0 < pause < timedelta(days=4).total_seconds()


async def test_a_recurring_timer_continues_from_the_shared_time(
    database: Database, recorder: RecordingPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose clock is behind must not set the next firing to a past time."""
    clock, behind_seconds = SharedClock(), 7200
    now = datetime.now(UTC).timestamp()
    clock.take(
        Reading(
            theirs_seconds=now + behind_seconds,
            host_seconds=now,
            elapsed_seconds=elapsed_seconds(),
            uncertain_seconds=0,
        )
    )
    monkeypatch.setattr(shared_clock, "_clock", clock)
    await SqlCronJobs(database, on_fire=TimerFirings(recorder).fire).add(cron_job(cron_expr="* * * * *"))
    await TimerSweep(database, TimerFirings(recorder)).sweep()
    async with database.read() as tx:
        job = await tx.cron_jobs.find("abcd")
    assert job is not None and job.next_fire_at is not None
    assert job.next_fire_at.timestamp() > now + behind_seconds


async def test_recurring_timer_with_an_unknown_zone_fires_and_is_paused(
    database: Database, recorder: RecordingPublisher
) -> None:
    jobs = SqlCronJobs(database, on_fire=TimerFirings(recorder).fire)
    await jobs.add(cron_job(timezone="Atlantis/Capital"))
    assert await TimerSweep(database, TimerFirings(recorder)).sweep() is None
    assert await history(database) == ["drink tea"]
    job = await jobs.get("abcd")
    assert job is not None and job.status == "paused"


async def test_recurring_timer_fired_by_hand_keeps_its_schedule(
    database: Database, recorder: RecordingPublisher
) -> None:
    jobs = SqlCronJobs(database, on_fire=TimerFirings(recorder).fire)
    later = datetime.now(UTC) + timedelta(days=1)
    await jobs.add(cron_job(next_fire_at=later))
    assert await jobs.run_now("abcd") and await jobs.run_now("abcd")
    assert await history(database) == ["drink tea", "drink tea"]
    job = await jobs.get("abcd")
    assert job is not None and job.next_fire_at == later
    assert recorder.rounds == ["c", "c"]


async def test_sweeper_wakes_for_a_timer_and_survives_a_failing_sweep(
    database: Database, background: BackgroundLoop, recorder: RecordingPublisher
) -> None:
    async def broken() -> float | None:
        raise StorageUnavailableError("gone")

    firings = TimerFirings(recorder)
    soon = datetime.now(UTC) + timedelta(seconds=0.3)
    await SqlTimers(database).add("c", fire_at=soon, description="soon", temporary=True)
    sweeper = Sweeper(
        database,
        LeaseKeeper(database, background),
        recorder,
        AgentSettings(lease_seconds=1800),
        owner="w1",
        sweeps=(broken, TimerSweep(database, firings).sweep),
    )
    sweeper.start()
    async with asyncio.timeout(WAIT_SECONDS):
        while await history(database) != ["soon"]:
            await asyncio.sleep(0.01)
    await sweeper.close()


async def test_the_chat_of_a_detached_repeatable_call_whose_worker_died_is_told_after_its_deadline(
    database: Database, background: BackgroundLoop, recorder: RecordingPublisher
) -> None:
    deadline = datetime.now(UTC) - timedelta(seconds=60)
    made = Invocation(
        call_id=new_id(), method="a.m.weigh", chat_key="c", container_key="k", issued_at=LONG_AGO,
        deadline=deadline, waits_until=LONG_AGO, repeatable=True, args="",
    )  # fmt: skip
    weigh = MethodEntry(
        name="weigh", task=made.method, plugin_key="a.m", label="weigh", type=SandboxMethodType.TOOL,
        signature="()", doc=None, lane=Lane.METHODS, repeatable=True,
    )  # fmt: skip
    await CallDetacher(database, recorder).detach(weigh, made, lane="methods")
    async with database.begin() as tx:  # its worker does not end it
        await tx.connection.execute(update(CALLS).values(lease_until=LONG_AGO))
    sweeper = Sweeper(database, LeaseKeeper(database, background), recorder, AgentSettings(), owner="w1")
    await sweeper.sweep()
    await sweeper.sweep()
    (text,) = await history(database)
    assert text.startswith(f"weigh (job {made.call_id}) failed: OutcomeUnknownError: its worker died")
    async with database.read() as tx:
        (woken,) = await tx.rounds.newest("c", limit=9)
        job = await tx.jobs.get(made.call_id)
    assert (woken.trigger_kind, woken.observation) == (TriggerKind.CALL, text)
    assert job.state is JobState.FAILED


async def test_temporary_timer_may_be_replaced_while_it_fires(
    database: Database, recorder: RecordingPublisher
) -> None:
    timers, sweep = SqlTimers(database), TimerSweep(database, TimerFirings(recorder))
    for number in range(5):
        await timers.add("c", fire_at=LONG_AGO, description=f"old {number}", temporary=True)
        later = datetime.now(UTC) + timedelta(days=1)
        await asyncio.gather(
            sweep.sweep(), timers.add("c", fire_at=later, description=f"new {number}", temporary=True)
        )
        (waiting,) = await timers.pending("c")
        assert waiting.description == f"new {number}"


@pytest.mark.parametrize("count", [0, 1])
async def test_the_pause_ends_at_the_next_timer(
    database: Database, recorder: RecordingPublisher, count: int
) -> None:
    for _ in range(count):
        await SqlTimers(database).add(
            "c", fire_at=datetime.now(UTC) + timedelta(hours=1), description="", temporary=False
        )
    pause = await TimerSweep(database, TimerFirings(recorder)).sweep()
    assert (pause is None) is (count == 0) and (pause is None or 3500 < pause <= 3600)


async def test_old_rows_are_deleted_once_an_hour(database: Database) -> None:
    async def add_old_job(name: str) -> None:
        async with database.begin() as tx:
            job = await tx.jobs.add(NewJob(type="t", task_id=name, plugin_key="a.b", chat_key="c"))
            await tx.jobs.request_cancel(job.id, reason="")
            await tx.connection.exec_driver_sql("UPDATE jobs SET updated_at = '2000-01-01 00:00:00.000000'")

    async def names() -> list[str]:
        async with database.read() as tx:
            return [job.task_id for job in await tx.jobs.newest(limit=9)]

    sweep = RetentionSweep(database, RetentionSettings())
    await add_old_job("first")
    pause = await sweep.sweep()
    assert await names() == [] and pause is not None and pause > 3000
    await add_old_job("second")
    await sweep.sweep()
    assert await names() == ["second"]
