"""Timers of chats."""

from __future__ import annotations

from nekro.app import timers
from nekro.app.timers import TimerChange, id_of, timers_after, timers_of
from nekro.operations.actor import Actor, Scope
from nekro.operations.pages import Beginning, Cursor, Limit, OfChat, page_of, text_of
from nekro_agent.errors import NotFoundError
from nekro_agent.ports import CronJob
from nekro_client.models import Page, Timer, TimerBody
from storage.repositories.timers import WorkerTimer

__all__ = ["change_timer", "delete_timer", "list_timers", "timer_answer"]


async def list_timers(
    actor: Actor,
    chat_key: OfChat = None,
    beginning: Beginning = "",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[Timer]:
    """List the timers that have not ended, by id."""
    actor.identity.require_list(Scope.ADMIN, chat_key=chat_key)
    after = "" if cursor is None else text_of(cursor)
    async with actor.services.database.read() as transaction:
        rows = await timers_after(transaction, chat_key, beginning=beginning, after=after, limit=limit + 1)
    return page_of(rows, limit=limit, answer=timer_answer, position=id_of)


async def change_timer(actor: Actor, timer_id: str, body: TimerBody) -> Timer:
    """Pause or resume a timer; a one-time timer whose time has passed fires when it is resumed."""
    return await _change(actor, timer_id, TimerChange.PAUSE if body.state == "paused" else TimerChange.RESUME)


async def delete_timer(actor: Actor, timer_id: str) -> Timer:
    """Delete a timer; returns what it was."""
    return await _change(actor, timer_id, TimerChange.DELETE)


async def _change(actor: Actor, timer_id: str, wanted: TimerChange) -> Timer:
    actor.identity.require(Scope.ADMIN)
    async with actor.services.database.begin() as transaction:
        timer = (await timers_of(transaction, [timer_id])).get(timer_id)
        if timer is None or not actor.identity.has_chat(timer.chat_key):
            raise NotFoundError(f"there is no timer {timer_id!r}")
        await actor.record(transaction, f"timer.{wanted.value}", timer_id)
        return timer_answer(await timers.change_timer(transaction, timer, wanted))


def timer_answer(timer: timers.Timer) -> Timer:
    """Return a timer of any kind."""
    if isinstance(timer, WorkerTimer):
        return Timer(
            id=timer.id,
            kind="once",
            chat_key=timer.chat_key,
            state="waiting",
            fires_at=timer.fire_at,
            description=timer.description,
            temporary=timer.temporary,
            owner=timer.worker,
            plugin=timer.plugin_key,
        )
    if isinstance(timer, CronJob):
        return Timer(
            id=timer.job_id,
            kind="recurring",
            chat_key=timer.chat_key,
            state="paused" if timer.next_fire_at is None else "waiting",
            fires_at=timer.next_fire_at,
            description=timer.event_desc,
            schedule=timer.cron_expr,
            timezone=timer.timezone,
            workday_mode=timer.workday_mode,
            title=timer.title,
            last_fired_at=timer.last_fired_at,
        )
    return Timer(
        id=timer.id,
        kind="once",
        chat_key=timer.chat_key,
        state=timer.state,
        fires_at=timer.fire_at,
        description=timer.description,
        temporary=timer.temporary,
    )
