"""Implements the SDK's timers on SQL, and the sweep that fires them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from nekro_agent.execution.current import current_account, effect_id
from nekro_agent.ports import CronJob, TimerInfo
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.driver.errors import outlasting
from storage.engine import Database
from storage.states import StoredKind, account_of_recurring
from storage.transaction import Transaction

__all__ = ["Firing", "NextFireAt", "OnFire", "SqlCronJobs", "SqlTimers", "fire_due"]


@dataclass(frozen=True, kw_only=True)
class Firing:
    """A timer that fires now."""

    #: Unique; the trigger id of the round that it causes.
    id: str
    chat_key: str
    text: str
    #: The timer, on whose account the round is.
    account_id: str | None = None


#: Writes the effects of a firing in the transaction that takes the firing, so that both commit or neither.
OnFire = Callable[[Transaction, Firing], Awaitable[object]]
#: Returns when a job fires next, from now on: firings that were missed while no sweep ran are fired once.
NextFireAt = Callable[[CronJob], datetime | None]


async def fire_due(database: Database, *, on_fire: OnFire, next_fire_at: NextFireAt, limit: int) -> int:
    """Fire the one-time and recurring timers that are due; returns how many.

    Several processes may run this concurrently; each firing is taken by one of them. Each firing has its
    own transaction.

    Args:
        limit: maximum number of firings of this sweep.
    """
    fired = 0
    while fired < limit:
        one = await _fire_timer(database, on_fire) or await _fire_cron_job(database, on_fire, next_fire_at)
        if not one:
            break
        fired += 1
    return fired


async def _fire_timer(database: Database, on_fire: OnFire) -> bool:
    async with database.begin() as tx:
        timers = await tx.timers.fire_due(limit=1)
        for timer in timers:
            await on_fire(
                tx, Firing(id=timer.id, chat_key=timer.chat_key, text=timer.description, account_id=timer.id)
            )
    return bool(timers)


async def _fire_cron_job(database: Database, on_fire: OnFire, next_fire_at: NextFireAt) -> bool:
    async with database.begin() as tx:
        jobs = await tx.cron_jobs.due(limit=1)
        for job in jobs:
            await tx.cron_jobs.advance(job, next_fire_at=next_fire_at(job))
            due = job.next_fire_at.isoformat() if job.next_fire_at else ""
            await on_fire(
                tx,
                Firing(
                    id=f"{job.job_id}:{due}",
                    chat_key=job.chat_key,
                    text=job.event_desc,
                    account_id=account_of_recurring(job.job_id),
                ),
            )
    return bool(jobs)


class SqlTimers:
    """Implements ``nekro_agent.ports.Timers``; the sweep fires them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, chat_key: str, *, fire_at: datetime, description: str, temporary: bool) -> TimerInfo:
        """Add a timer; a temporary one atomically replaces the chat's other temporary one.

        A call that is repeated because its worker died adds none twice.
        """
        timer_id = effect_id("timer", chat_key, description, str(temporary))
        account_id = current_account()

        @outlasting
        async def add() -> TimerInfo:
            async with self._database.begin() as tx:
                await tx.chats.ensure(chat_key)
                # Of two concurrent temporary timers, the second must see the first to replace it.
                await tx.chats.lock(chat_key)
                timer = await tx.timers.add(
                    chat_key, fire_at=fire_at, description=description, temporary=temporary, timer_id=timer_id
                )
                await tx.keys.pass_on(account_id, timer.id)
                tx.stored_bytes.add(account_id, StoredKind.ROUNDS, ROW_BYTES + size_of(description))
                return timer

        return await add()

    @outlasting
    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel the chat's timers, or only the (non-)temporary ones; returns how many."""
        async with self._database.autocommit() as tx:
            return await tx.timers.clear(chat_key, temporary=temporary)

    @outlasting
    async def delete(self, timer_id: str) -> bool:
        """Cancel one timer; False if it has fired, was cancelled or does not exist."""
        async with self._database.autocommit() as tx:
            return await tx.timers.delete(timer_id)

    @outlasting
    async def pending(self, chat_key: str) -> list[TimerInfo]:
        """Return the chat's timers, soonest first."""
        async with self._database.read() as tx:
            return await tx.timers.of_chat(chat_key)


class SqlCronJobs:
    """Implements ``nekro_agent.ports.CronJobs``; the sweep fires them."""

    def __init__(self, database: Database, *, on_fire: OnFire) -> None:
        self._database = database
        self._on_fire = on_fire

    @outlasting
    async def add(self, job: CronJob) -> bool:
        """Add a job; False, without a change, when the id is taken."""
        async with self._database.begin() as tx:
            await tx.chats.ensure(job.chat_key)
            is_new = await tx.cron_jobs.add(job)
            if is_new:
                account_id = account_of_recurring(job.job_id)
                await tx.keys.forget(account_id)  # a timer that was deleted may have had this id
                await tx.keys.pass_on(current_account(), account_id)
                size = ROW_BYTES + size_of(job.title, job.event_desc)
                tx.stored_bytes.add(current_account(), StoredKind.ROUNDS, size)
            return is_new

    @outlasting
    async def get(self, job_id: str) -> CronJob | None:
        """Return a job, or None."""
        async with self._database.read() as tx:
            return await tx.cron_jobs.find(job_id)

    @outlasting
    async def replace(self, job: CronJob) -> bool:
        """Replace everything but ``last_fired_at`` and ``created_at``; False when there is no such job."""
        async with self._database.autocommit() as tx:
            return await tx.cron_jobs.replace(job)

    @outlasting
    async def delete(self, job_id: str) -> bool:
        """Delete a job; True when there was one."""
        async with self._database.autocommit() as tx:
            return await tx.cron_jobs.delete(job_id)

    @outlasting
    async def of_chat(self, chat_key: str | None) -> list[CronJob]:
        """Return the jobs of a chat, or of all chats if it is None, oldest first."""
        async with self._database.read() as tx:
            return await tx.cron_jobs.of_chat(chat_key)

    async def run_now(self, job_id: str) -> bool:
        """Fire a job once, independently of its schedule; False when there is no such job."""
        firing_id = effect_id("firing", job_id)
        account_id = current_account() or account_of_recurring(job_id)

        @outlasting
        async def fire() -> bool:
            async with self._database.begin() as tx:
                job = await tx.cron_jobs.find(job_id)
                if job is None:
                    return False
                firing = Firing(
                    id=f"{job_id}:now:{firing_id}",
                    chat_key=job.chat_key,
                    text=job.event_desc,
                    account_id=account_id,
                )
                await self._on_fire(tx, firing)
                return True

        return await fire()
