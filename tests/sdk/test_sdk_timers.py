"""Timers: firing times and refused arguments."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from waiting import WAIT_SECONDS, cpu_limit

from nekro_agent import cron
from nekro_agent.api import recurring_timer, timer
from nekro_agent.errors import InvalidValueError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.models.db_recurring_timer_job import DBRecurringTimerJob
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import WorkdayMode
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.services.timer import timer_service
from nekro_agent.services.timer.timer_service import callback_timers
from nekro_agent.testing import InMemoryRuntime

CHAT = "chat"
FRIDAY = datetime(2026, 3, 6, 12, 0, tzinfo=UTC)


def due(expression: str, zone: str = "UTC", mode: str = "none", after: datetime = FRIDAY) -> str:
    found = cron.next_fire(expression, timezone=zone, workday_mode=WorkdayMode(mode), after=after)
    assert found.tzinfo is UTC
    return found.strftime("%a %m-%d %H:%M")


@pytest.mark.parametrize(
    ("expression", "zone", "mode", "expected"),
    [
        ("0 9 * * *", "UTC", "none", "Sat 03-07 09:00"),
        ("0 9 * * *", "UTC", "mon_fri", "Mon 03-09 09:00"),
        ("0 9 * * *", "UTC", "cn_workday", "Mon 03-09 09:00"),
        ("0 9 * * *", "UTC", "weekend", "Sat 03-07 09:00"),
        ("0 9 * * *", "Asia/Tokyo", "mon_fri", "Mon 03-09 00:00"),
        ("0 1 * * *", "Asia/Tokyo", "weekend", "Fri 03-06 16:00"),
        ("*/15 * * * *", "UTC", "none", "Fri 03-06 12:15"),
        ("0 0 29 2 *", "UTC", "none", "Tue 02-29 00:00"),
    ],
)
def test_the_next_time_follows_the_zone_and_the_mode(
    expression: str, zone: str, mode: str, expected: str
) -> None:
    assert due(expression, zone, mode) == expected


@pytest.mark.parametrize(("expression", "mode"), [("* * * * 1-5", "weekend"), ("* * * * 0,6", "mon_fri")])
def test_a_timer_without_a_wanted_day_is_refused_in_little_time(expression: str, mode: str) -> None:
    """In eight years it is due two million times, on days that the mode excludes."""
    with cpu_limit(5), pytest.raises(InvalidValueError, match="never fires"):
        due(expression, mode=mode)


def test_a_long_expression_is_refused_in_little_time() -> None:
    with cpu_limit(1), pytest.raises(InvalidValueError, match="is not valid"):
        due(f"{'0-59,' * 200_000}0 * * * *")


def test_daylight_saving_moves_the_utc_time() -> None:
    before = datetime(2026, 3, 28, 12, tzinfo=UTC)
    assert due("0 9 * * *", "Europe/Berlin", after=before - timedelta(days=1)) == "Sat 03-28 08:00"
    assert due("0 9 * * *", "Europe/Berlin", after=before) == "Sun 03-29 07:00"


@pytest.mark.parametrize(
    ("expression", "after", "expected"),
    [
        ("30 2 * * *", "10-24 12:00", ["Sun 10-25 00:30", "Mon 10-26 01:30"]),  # 02:30 is shown twice
        ("30 2,14 * * *", "10-24 20:00", ["Sun 10-25 00:30", "Sun 10-25 13:30"]),
        ("30 2 * * *", "03-28 12:00", ["Sun 03-29 01:00", "Mon 03-30 00:30"]),  # 02:30 is skipped
        ("30 * * * *", "10-25 00:00", ["Sun 10-25 00:30", "Sun 10-25 01:30"]),
        ("30 */2 * * *", "10-25 00:00", ["Sun 10-25 00:30", "Sun 10-25 01:30"]),
    ],
)
def test_a_time_is_due_once_on_the_days_on_which_the_clock_changes(
    expression: str, after: str, expected: list[str]
) -> None:
    moment, found = datetime.strptime(f"2026-{after} +0000", "%Y-%m-%d %H:%M %z"), []
    for _ in expected:
        moment = cron.next_fire(
            expression, timezone="Europe/Berlin", workday_mode=WorkdayMode.NONE, after=moment
        )
        found.append(moment.strftime("%a %m-%d %H:%M"))
    assert found == expected


@pytest.mark.parametrize("bad", ["", "* * * *", "* * * * * *", "61 * * * *", "x y z a b", "@daily", None])
def test_invalid_expressions_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidValueError, match="cron expression"):
        recurring_timer.validate_cron_expr(bad)


def test_a_date_that_never_occurs_is_refused() -> None:
    with pytest.raises(InvalidValueError):
        due("0 0 30 2 *")
    assert recurring_timer.validate_cron_expr(" 0   9 * * 1-5 ") == "0 9 * * 1-5"
    assert recurring_timer.validate_timezone("Asia/Shanghai") == "Asia/Shanghai"
    for bad in ("Mars", "", "../etc/passwd", None):
        with pytest.raises(InvalidValueError, match="time zone"):
            recurring_timer.validate_timezone(bad)  # type: ignore[arg-type]


async def test_a_recurring_timer_is_changed_paused_resumed_and_deleted(world: InMemoryRuntime) -> None:
    job = await recurring_timer.create_cron_job(
        CHAT, "0 9 * * *", "morning", "Asia/Tokyo", "mon_fri", title="t"
    )
    job_id = recurring_timer.get_job_id(job)
    changed = await recurring_timer.update_job(job_id, cron_expr="0 10 * * *", event_desc="later")
    assert (changed.cron_expr, changed.event_desc, changed.title) == ("0 10 * * *", "later", "t")
    assert changed.next_fire_at is not None and changed.next_fire_at.hour == 1
    assert (await recurring_timer.pause_job(job_id)).status == "paused"
    assert (await recurring_timer.update_job(job_id, title="new")).status == "paused"
    other = await recurring_timer.create_cron_job(CHAT, "0 1 * * *", "night", "UTC")
    assert [j.job_id for j in await recurring_timer.list_jobs(CHAT, status="active")] == [other.job_id]
    active, paused, upcoming, recent = await recurring_timer.get_job_summary(CHAT)
    assert (active, paused, [j.job_id for j in upcoming], recent) == (1, 1, [other.job_id], [])
    assert (await recurring_timer.resume_job(job_id)).status == "active"
    assert await recurring_timer.run_now(job_id) is True
    assert world.messages.triggered == [CHAT]
    assert await recurring_timer.delete_job(job_id) is True
    assert await recurring_timer.delete_job(job_id) is False
    for change in (recurring_timer.run_now, recurring_timer.get_job, recurring_timer.pause_job):
        with pytest.raises(ValueError, match="no recurring timer"):
            await change(job_id)


async def test_recurring_timers_are_listed_last_changed_first_up_to_a_limit(world: InMemoryRuntime) -> None:
    jobs = [
        await recurring_timer.create_cron_job(CHAT, "0 9 * * *", f"job {n}", "UTC", title=f"t{n}")
        for n in range(4)
    ]
    await recurring_timer.update_job(jobs[1].job_id, event_desc="changed")
    assert [job.event_desc for job in await recurring_timer.list_jobs(CHAT, limit=2)] == ["changed", "job 3"]
    assert len(await recurring_timer.list_jobs(CHAT)) == 4
    await recurring_timer.pause_job(jobs[2].job_id)
    assert await recurring_timer.run_now(jobs[2].job_id) is False
    (paused,) = await recurring_timer.list_jobs(chat_key=CHAT, status="paused", limit=10)
    assert (paused.job_id, paused.next_run_at, paused.misfire_policy) == (jobs[2].job_id, None, "fire_once")


async def test_a_recurring_timer_is_a_row_that_plugins_change(world: InMemoryRuntime) -> None:
    made = await recurring_timer.create_cron_job(CHAT, "0 9 * * *", "morning", "UTC")
    row = await DBRecurringTimerJob.get(job_id=made.job_id)
    assert (row.chat_key, row.status, row.last_run_at) == (CHAT, "active", None)
    row.cron_expr, row.title = "30  10 * * *", "later"
    await row.save()
    again = await recurring_timer.get_job(made.job_id)
    assert (again.cron_expr, again.title) == ("30 10 * * *", "later")
    assert again.next_run_at is not None and (again.next_run_at.hour, again.next_run_at.minute) == (10, 30)
    row.status = "paused"
    await row.save()
    assert await DBRecurringTimerJob.filter(chat_key=CHAT, status="paused").count() == 1
    row.cron_expr = "never"
    with pytest.raises(InvalidValueError, match="not valid"):
        await row.save()
    await row.delete()
    assert await DBRecurringTimerJob.filter(chat_key=CHAT).exists() is False
    with pytest.raises(InvalidValueError, match="create_cron_job"):
        await DBRecurringTimerJob.create(
            job_id="abcd",
            chat_key=CHAT,
            event_desc="x",
            cron_expr="* * * * *",
            timezone="UTC",
            create_time=made.create_time,
            update_time=made.update_time,
        )


@pytest.mark.parametrize(
    "values", [{"chat_key": ""}, {"workday_mode": "holiday"}, {"timezone": "X"}, {"cron_expr": "x"}]
)
async def test_invalid_values_of_a_recurring_timer_are_refused(
    world: InMemoryRuntime, values: dict[str, Any]
) -> None:
    good = {"chat_key": CHAT, "cron_expr": "0 9 * * *", "event_desc": "x", "timezone": "UTC"}
    with pytest.raises(InvalidValueError):
        await recurring_timer.create_cron_job(**{**good, **values})


@pytest.mark.parametrize("trigger_time", ["5", 1.5, True, None, 1, 2**40])
async def test_invalid_times_set_no_timer(world: InMemoryRuntime, trigger_time: Any) -> None:
    assert await timer.set_timer(CHAT, trigger_time, "x") is False
    assert await timer.get_timers(CHAT) == []


async def test_zero_wakes_now_and_a_negative_time_clears(world: InMemoryRuntime) -> None:
    assert await timer.set_timer(CHAT, 0, "now") is True
    assert world.messages.triggered == [CHAT]
    soon = int(time.time()) + 60
    await timer.set_timer(CHAT, soon, "a")
    await timer.set_temp_timer(CHAT, soon, "b")
    await timer.set_temp_timer(CHAT, -1, "")
    assert [(t.event_desc, t.temporary, t.trigger_time) for t in await timer.get_timers(CHAT)] == [
        ("a", False, soon)
    ]
    await timer.set_timer(CHAT, -1, "")
    assert await timer.get_timers(CHAT) == []


async def test_the_service_object_sets_replaces_and_clears_timers(world: InMemoryRuntime) -> None:
    soon = int(time.time()) + 60

    async def listed() -> set[str]:
        return {t.event_desc for t in await timer.get_timers(CHAT)}

    for text, override in (("mine", False), ("draft", True), ("final", True)):
        await timer_service.set_timer(CHAT, soon, text, override=override)
    assert await listed() == {"mine", "final"}
    await timer_service.set_timer(CHAT, -1, "", temporary=False)
    assert await listed() == {"final"}
    await timer_service.set_timer(CHAT, -1, "")
    assert await listed() == set()


def next_second() -> int:
    """A full second that is not over before a timer is set for it."""
    return int(time.time() + 0.5) + 1


async def test_a_timer_with_a_callback_is_called_once(world: InMemoryRuntime) -> None:
    called = asyncio.Event()

    async def callback() -> None:
        timer_service.get_timers(CHAT)[:]  # a callback may read the database as a method may
        called.set()

    assert await timer_service.set_timer(CHAT, next_second(), "c", callback=callback) is True
    await asyncio.wait_for(called.wait(), WAIT_SECONDS)
    assert await timer_service.set_timer(CHAT, 1, "past", callback=callback) is False
    assert list(await timer_service.get_timers(CHAT)) == []


async def test_a_callback_is_called_although_the_loop_that_set_its_timer_has_ended(
    world: InMemoryRuntime,
) -> None:
    """As in lane ``long``, whose loops run only while there is a job."""
    called: asyncio.Queue[object] = asyncio.Queue()

    async def callback() -> None:
        called.put_nowait(asyncio.get_running_loop())

    def run_job() -> None:
        asyncio.run(timer_service.set_timer(CHAT, next_second(), "c", callback=callback))

    await asyncio.to_thread(run_job)
    (pending,) = await timer_service.get_timers(CHAT)
    assert pending.event_desc == "c"
    assert await asyncio.wait_for(called.get(), WAIT_SECONDS) is asyncio.get_running_loop()


async def test_the_timers_of_a_plugin_end_when_it_stops(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    async def never() -> None:
        raise AssertionError

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "wait")
    async def wait(ctx: AgentCtx) -> None:
        later = int(time.time()) + 3600
        await asyncio.create_task(timer_service.set_timer(ctx.chat_key, later, "its", callback=never))

    await world.call("wait", chat_key=CHAT)
    await timer_service.set_timer(CHAT, int(time.time()) + 3600, "other", callback=never)
    assert [one.plugin_key for one in callback_timers()] == [plugin.key, ""]
    await world.host.stop_plugin(plugin)
    assert [one.event_desc for one in await timer_service.get_timers(CHAT)] == ["other"]
    await timer_service.set_timer(CHAT, -1, "")


async def test_a_plugin_lists_and_deletes_its_timers_by_id(
    world: InMemoryRuntime, plugin: NekroPlugin
) -> None:
    """A plugin that reschedules itself reads the id of the timer that it has just set."""

    async def never() -> None:
        raise AssertionError

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "reschedule")
    async def reschedule(ctx: AgentCtx) -> list[object]:
        later = int(time.time()) + 3600
        await timer_service.set_timer(ctx.chat_key, later, "kept")
        await timer_service.set_timer(ctx.chat_key, later, "called", silent=True, callback=never)
        last = timer_service.get_timers(ctx.chat_key)[-1]
        stored = timer_service.get_timers(ctx.chat_key)[0]
        deleted = [
            await timer_service.delete_timer_by_id(one.task_id) for one in (last, last, stored, stored)
        ]
        return [last.event_desc, stored.event_desc, deleted, len(timer_service.get_timers(ctx.chat_key))]

    assert (await world.call("reschedule", chat_key=CHAT)).value == [
        "called", "kept", [True, False, True, False], 0,
    ]  # fmt: skip


async def test_timers_are_a_list_with_and_without_await(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    """In the reference API the function is not a coroutine."""

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "list")
    async def listed(ctx: AgentCtx) -> list[object]:
        await timer.set_timer(ctx.chat_key, int(time.time()) + 60, "tea")
        at_once = timer.get_timers(ctx.chat_key)
        before = repr(at_once)
        return [
            len(at_once),
            at_once[0].event_desc,
            [t.event_desc for t in at_once[:1]],
            bool(at_once),
            before,
        ]

    @plugin.mount_sandbox_method(SandboxMethodType.TOOL, "beside")
    def beside(ctx: AgentCtx) -> int:
        return len(timer.get_timers(ctx.chat_key))

    answer = (await world.call("listed")).value
    assert answer == [1, "tea", ["tea"], True, "<timers of test-chat, not read yet>"]
    assert [t.event_desc for t in await timer.get_timers("test-chat")] == ["tea"]
    with pytest.raises(InvalidValueError, match="write `await get_timers"):
        await world.call("beside")
