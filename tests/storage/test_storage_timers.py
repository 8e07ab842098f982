"""Timers, recurring timers and marks: rows that the sweep and the routing read."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from nekro_agent.errors import ConflictError, NotFoundError
from nekro_agent.methods import Lane
from storage.engine import Database
from storage.rounds import RoundRequest
from storage.states import MarkSource, TimerState, TriggerKind
from storage.timers import CronJob, NewCronJob

PAST = datetime(2020, 1, 1, tzinfo=UTC)
FUTURE = datetime.now(UTC) + timedelta(days=1)


@pytest.fixture
async def chat(database: Database) -> str:
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
    return "chat"


async def test_timer_fires_once_in_the_whole_fleet(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        for number in range(20):
            await tx.timers.add(
                chat, fire_at=PAST + timedelta(seconds=number), description=f"{number}", temporary=False
            )
        await tx.timers.add(chat, fire_at=FUTURE, description="later")

    async def sweep() -> list[str]:
        async with database.begin() as tx:
            fired = await tx.timers.fire_due(limit=6)
            assert {timer.state for timer in fired} <= {TimerState.FIRED}
            for timer in fired:
                await tx.rounds.request(
                    RoundRequest(chat_key=chat, trigger_kind=TriggerKind.TIMER, trigger_id=timer.id)
                )
            return [timer.description for timer in fired]

    first = await sweep()
    assert first == ["0", "1", "2", "3", "4", "5"]
    others = await asyncio.gather(*(sweep() for _ in range(6)))
    late = [await sweep(), await sweep()]
    assert sorted(int(name) for names in [first, *others, *late] for name in names) == list(range(20))
    async with database.read() as tx:
        assert [timer.description for timer in await tx.timers.of_chat(chat)] == ["later"]
        assert len(await tx.rounds.newest(chat, limit=50)) == 20


async def test_sweep_that_dies_leaves_its_timers_to_the_next(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.timers.add(chat, fire_at=PAST, description="x")
    with pytest.raises(ZeroDivisionError):
        async with database.begin() as tx:
            assert len(await tx.timers.fire_due(limit=9)) == 1
            raise ZeroDivisionError
    async with database.begin() as tx:
        assert len(await tx.timers.fire_due(limit=9)) == 1


async def test_new_temporary_timer_replaces_the_old_one(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.timers.add(chat, fire_at=FUTURE, description="kept")
        await tx.timers.add(chat, fire_at=FUTURE, description="old", temporary=True)
        await tx.timers.add(chat, fire_at=FUTURE, description="new", temporary=True)
        assert {timer.description for timer in await tx.timers.of_chat(chat)} == {"kept", "new"}
        assert await tx.timers.clear(chat, temporary=True) == 1
        assert await tx.timers.clear(chat, temporary=True) == 0
        assert await tx.timers.clear(chat) == 1
        assert await tx.timers.of_chat(chat) == []


def _cron(job_id: str = "job1", **values: object) -> NewCronJob:
    fields: dict[str, object] = {
        "chat_key": "chat", "cron_expr": "0 9 * * *", "timezone": "Asia/Tokyo",
        "description": "greet", "next_fire_at": PAST,
    }  # fmt: skip
    return NewCronJob(id=job_id, **{**fields, **values})  # type: ignore[arg-type]


async def test_recurring_timer_fires_once_per_time(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.cron_jobs.add(_cron())
        await tx.cron_jobs.add(_cron("job2", next_fire_at=None))
        await tx.cron_jobs.add(_cron("job3", next_fire_at=FUTURE))

    async def sweep() -> list[CronJob]:
        async with database.begin() as tx:
            due = await tx.cron_jobs.due(limit=9)
            return [job for job in due if await tx.cron_jobs.advance(job, next_fire_at=FUTURE)]

    fired = [job for jobs in await asyncio.gather(*(sweep() for _ in range(5))) for job in jobs]
    assert [(job.id, job.next_fire_at) for job in fired] == [("job1", PAST)]
    async with database.begin() as tx:
        job = await tx.cron_jobs.get("job1")
        assert (job.last_fired_at, job.next_fire_at, job.paused) == (PAST, FUTURE, False)
        assert not await tx.cron_jobs.advance(fired[0], next_fire_at=FUTURE)
        assert (await tx.cron_jobs.get("job2")).paused
        assert [job.id for job in await tx.cron_jobs.of_chat(chat)] == ["job1", "job2", "job3"]


async def test_recurring_timer_is_changed_paused_and_deleted(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.cron_jobs.add(_cron())
        changed = await tx.cron_jobs.update("job1", next_fire_at=FUTURE, cron_expr="* * * * *", title="T")
        assert (changed.cron_expr, changed.title, changed.description) == ("* * * * *", "T", "greet")
        assert (await tx.cron_jobs.update("job1", next_fire_at=None)).paused
        with pytest.raises(TypeError, match="chat_key"):
            await tx.cron_jobs.update("job1", next_fire_at=None, chat_key="other")
        with pytest.raises(NotFoundError):
            await tx.cron_jobs.update("job9", next_fire_at=None)
        assert await tx.cron_jobs.delete("job1")
        assert not await tx.cron_jobs.delete("job1")
        assert await tx.cron_jobs.find("job1") is None
    with pytest.raises(ConflictError):
        async with database.begin() as tx:
            await tx.cron_jobs.add(_cron(chat_key="nobody"))


async def test_operator_s_mark_stands_against_the_watchdog(database: Database) -> None:
    async with database.begin() as tx:
        assert await tx.marks.mark_blocking("a.b.m", lane=Lane.LONG, reason="blocked 3 s")
        assert await tx.marks.mark_blocking("a.b.m", lane=Lane.LONG, reason="blocked 4 s")
        (mark,) = await tx.marks.all()
        assert (mark.lane, mark.source, mark.reason) == (Lane.LONG, MarkSource.WATCHDOG, "blocked 4 s")
        await tx.marks.pin("a.b.m", lane=Lane.METHODS, reason="fixed in 1.2")
        assert not await tx.marks.mark_blocking("a.b.m", lane=Lane.LONG, reason="blocked 5 s")
        await tx.marks.pin("a.b.m", lane=Lane.LONG, reason="not fixed")
        (mark,) = await tx.marks.all()
        assert (mark.lane, mark.source, mark.reason) == (Lane.LONG, MarkSource.OPERATOR, "not fixed")
        assert await tx.marks.clear("a.b.m")
        assert not await tx.marks.clear("a.b.m")
        assert await tx.marks.all() == []
