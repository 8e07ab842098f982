"""Timers, recurring timers and lane overrides: rows that the sweep and the routing read."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nekro_agent.errors import ConflictError, NotFoundError
from nekro_agent.methods import Lane
from nekro_agent.ports import CronJob, WorkdayMode
from storage.caller_reads import LaneOverride, lane_overrides
from storage.engine import Database
from storage.repositories.rounds import RoundRequest
from storage.states import TimerState, TriggerKind
from storage.timer_services import Firing, fire_due
from storage.transaction import Transaction

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


async def test_timers_of_a_sweep_that_dies_are_fired_by_the_next(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.timers.add(chat, fire_at=PAST, description="x")
    with pytest.raises(ZeroDivisionError):
        async with database.begin() as tx:
            assert len(await tx.timers.fire_due(limit=9)) == 1
            raise ZeroDivisionError
    async with database.begin() as tx:
        assert len(await tx.timers.fire_due(limit=9)) == 1


async def test_paused_timer_does_not_fire_until_it_is_resumed(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        timer = await tx.timers.add(chat, fire_at=PAST, description="x")
        assert await tx.timers.set_paused(timer.id, True)
    async with database.begin() as tx:
        assert await tx.timers.fire_due(limit=9) == []
        assert await tx.timers.seconds_until_next() is None
        assert await tx.timers.open_ids(None, after="", limit=9) == [timer.id]
        assert (await tx.timers.get_open(timer.id)).state is TimerState.PAUSED
        assert await tx.timers.set_paused(timer.id, False)
        assert (await tx.timers.get_open(timer.id)).state is TimerState.WAITING
    async with database.begin() as tx:
        assert [fired.id for fired in await tx.timers.fire_due(limit=9)] == [timer.id]
    async with database.begin() as tx:
        assert not await tx.timers.set_paused(timer.id, True)
        assert not await tx.timers.delete(timer.id)
        with pytest.raises(NotFoundError, match=timer.id):
            await tx.timers.get_open(timer.id)


async def test_paused_timers_are_deleted_and_cleared_like_waiting_ones(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("other")
        timers = [await tx.timers.add(chat, fire_at=FUTURE, description="x") for _ in range(2)]
        other = await tx.timers.add("other", fire_at=FUTURE, description="y")
        for timer in timers:
            assert await tx.timers.set_paused(timer.id, True)
        assert await tx.timers.delete(timers[0].id)
    async with database.begin() as tx:
        assert await tx.timers.open_ids(chat, after="", limit=9) == [timers[1].id]
        assert await tx.timers.clear(chat) == 1
        assert await tx.timers.open_ids(None, after="", limit=9) == [other.id]


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


def _cron(job_id: str = "job1", **changes: Any) -> CronJob:
    job = CronJob(
        job_id=job_id,
        chat_key="chat",
        cron_expr="0 9 * * *",
        timezone="Asia/Tokyo",
        workday_mode=WorkdayMode.MON_FRI,
        title=None,
        event_desc="greet",
        next_fire_at=PAST,
        last_fired_at=None,
        created_at=PAST,
        updated_at=PAST,
    )
    return dataclasses.replace(job, **changes)


async def test_recurring_timer_is_read_back_equal_and_its_id_is_reserved(
    database: Database, chat: str
) -> None:
    async with database.begin() as tx:
        assert await tx.cron_jobs.add(_cron())
        assert not await tx.cron_jobs.add(_cron(event_desc="another"))
        assert await tx.cron_jobs.find("job1") == _cron()
    with pytest.raises(ConflictError):
        async with database.begin() as tx:
            await tx.cron_jobs.add(_cron("job2", chat_key="nobody"))


async def test_every_firing_is_claimed_once_with_its_effects(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        for number in range(6):
            await tx.timers.add(chat, fire_at=PAST, description=f"t{number}")
        await tx.timers.add(chat, fire_at=FUTURE, description="later")
        for number in range(3):
            await tx.cron_jobs.add(_cron(f"job{number}", event_desc=f"j{number}"))
        await tx.cron_jobs.add(_cron("paused", next_fire_at=None))
        await tx.cron_jobs.add(_cron("later", next_fire_at=FUTURE))
    seen: list[str] = []

    async def on_fire(tx: Transaction, firing: Firing) -> None:
        await tx.rounds.request(
            RoundRequest(chat_key=firing.chat_key, trigger_kind=TriggerKind.TIMER, trigger_id=firing.id)
        )
        seen.append(firing.text)

    async def sweep() -> int:
        return await fire_due(database, on_fire=on_fire, next_fire_at=lambda _job: FUTURE, limit=5)

    assert sum(await asyncio.gather(*(sweep() for _ in range(4)))) + await sweep() == 9
    assert sorted(seen) == ["j0", "j1", "j2", "t0", "t1", "t2", "t3", "t4", "t5"]
    async with database.read() as tx:
        assert len({item.trigger_id for item in await tx.rounds.newest(chat, limit=50)}) == 9
        job = await tx.cron_jobs.find("job0")
        assert job is not None and (job.last_fired_at, job.next_fire_at) == (PAST, FUTURE)


async def test_firing_that_fails_is_fired_again(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.cron_jobs.add(_cron())
    fired: list[str] = []

    async def on_fire(_tx: Transaction, firing: Firing) -> None:
        fired.append(firing.id)
        if len(fired) == 1:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fire_due(database, on_fire=on_fire, next_fire_at=lambda _job: None, limit=9)
    assert await fire_due(database, on_fire=on_fire, next_fire_at=lambda _job: None, limit=9) == 1
    assert fired[0] == fired[1] == f"job1:{PAST.isoformat()}"


async def test_an_already_recorded_time_is_not_recorded_again(database: Database, chat: str) -> None:
    async with database.begin() as tx:
        await tx.cron_jobs.add(_cron())
        assert await tx.cron_jobs.advance(_cron(), next_fire_at=FUTURE)
        assert not await tx.cron_jobs.advance(_cron(), next_fire_at=FUTURE)


async def test_override_of_an_operator_has_precedence_over_the_watchdog(database: Database) -> None:
    async with database.begin() as tx:
        assert await tx.lane_overrides.set_by_watchdog("a.b.m", lane=Lane.LONG, reason="blocked 3 s")
        assert await tx.lane_overrides.set_by_watchdog("a.b.m", lane=Lane.LONG, reason="blocked 4 s")
        assert await lane_overrides(tx.connection) == {
            "a.b.m": LaneOverride(lane="long", reason="blocked 4 s", source="watchdog")
        }
        await tx.lane_overrides.set_by_operator("a.b.m", lane=Lane.METHODS, reason="fixed in 1.2")
        assert not await tx.lane_overrides.set_by_watchdog("a.b.m", lane=Lane.LONG, reason="blocked 5 s")
        await tx.lane_overrides.set_by_operator("a.b.m", lane=Lane.LONG, reason="not fixed")
        assert await lane_overrides(tx.connection) == {
            "a.b.m": LaneOverride(lane="long", reason="not fixed", source="operator")
        }
        assert await tx.lane_overrides.clear("a.b.m")
        assert not await tx.lane_overrides.clear("a.b.m")
        assert await lane_overrides(tx.connection) == {}
