"""One-time and recurring timers of chats: each firing is taken once in the whole fleet.

The sweep takes a due firing and requests the round in the same transaction, so a firing is
neither lost nor duplicated when its worker dies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import Select, delete, func, select, union_all, update

from nekro_agent.errors import NotFoundError
from nekro_agent.ports import CallbackTimer, CronJob, TimerInfo
from storage.repositories.base import Repository, chosen_once, columns_of, found, values_of
from storage.repositories.leases import is_free
from storage.sql import insert, now
from storage.states import OPEN_TIMER_STATES, TimerState, new_id
from storage.tables import CRON_JOBS, TIMERS, WORKER_TIMERS, WORKERS

__all__ = ["CronJobRepository", "RecordedTimer", "TimerRepository", "WorkerTimer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedTimer(TimerInfo):
    """A one-time timer with its state."""

    state: TimerState


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTimer(CallbackTimer):
    """A timer with a callback, and the worker that owns it."""

    #: Name of the worker.
    worker: str


class TimerRepository(Repository):
    """Rows of one-time timers."""

    async def add(
        self,
        chat_key: str,
        *,
        fire_at: datetime,
        description: str,
        temporary: bool = False,
        timer_id: str | None = None,
    ) -> TimerInfo:
        """Add a timer; a temporary one replaces the chat's waiting temporary one.

        Args:
            timer_id: a timer of this id is left as it is, unless it was cancelled: then it waits again.
                None: a new id.

        Raises:
            ConflictError: the chat has no row.
        """
        if timer_id is not None:
            same = select(TIMERS).where(TIMERS.c.id == timer_id, TIMERS.c.state != TimerState.CANCELLED)
            if (earlier := await self._one_or_none(TimerInfo, same)) is not None:
                return earlier
        if temporary:
            await self.clear(chat_key, temporary=True)
        new = insert(self._dialect, TIMERS).values(
            id=timer_id or new_id(),
            chat_key=chat_key,
            fire_at=fire_at,
            description=description,
            temporary=temporary,
            state=TimerState.WAITING,
            created_at=now(),
        )
        changes = {"state": new.excluded.state, "fire_at": new.excluded.fire_at}
        statement = new.on_conflict_do_update(index_elements=[TIMERS.c.id], set_=changes).returning(TIMERS)
        return found(await self._one_or_none(TimerInfo, statement), "timer of chat", chat_key)

    async def of_chat(self, chat_key: str) -> list[TimerInfo]:
        """List the chat's waiting timers, the next one first."""
        statement = select(TIMERS).where(TIMERS.c.chat_key == chat_key, TIMERS.c.state == TimerState.WAITING)
        return await self._all(TimerInfo, statement.order_by(TIMERS.c.fire_at, TIMERS.c.id))

    async def open_ids(
        self, chat_key: str | None, *, beginning: str = "", after: str, limit: int
    ) -> list[str]:
        """List the ids of timers of all kinds that have not ended, in their order in the database.

        Args:
            chat_key: None means all chats.
            beginning: only ids that begin with it.
            after: only ids after this one; "" begins with the first.
        """
        once = select(TIMERS.c.id.label("id")).where(
            TIMERS.c.state.in_(OPEN_TIMER_STATES), TIMERS.c.id > after
        )
        recurring = select(CRON_JOBS.c.job_id.label("id")).where(CRON_JOBS.c.job_id > after)
        called = _of_live_workers(select(WORKER_TIMERS.c.id.label("id"))).where(WORKER_TIMERS.c.id > after)
        if chat_key is not None:
            once = once.where(TIMERS.c.chat_key == chat_key)
            recurring = recurring.where(CRON_JOBS.c.chat_key == chat_key)
            called = called.where(WORKER_TIMERS.c.chat_key == chat_key)
        every = union_all(once, recurring, called).subquery()
        statement = select(every.c.id).order_by(every.c.id).limit(limit)
        if beginning:
            statement = statement.where(every.c.id.startswith(beginning, autoescape=True))
        return [row[0] for row in await self._rows(statement)]

    async def open_of(self, ids: Collection[str]) -> list[RecordedTimer]:
        """Return the waiting and paused timers among some ids, in no order."""
        statement = select(TIMERS).where(TIMERS.c.id.in_(ids), TIMERS.c.state.in_(OPEN_TIMER_STATES))
        return await self._all(RecordedTimer, statement)

    async def with_callback(self, ids: Collection[str]) -> list[WorkerTimer]:
        """Return the timers with callbacks of live workers among some ids, in no order."""
        columns = columns_of(WORKER_TIMERS, CallbackTimer)
        statement = _of_live_workers(select(*columns, WORKERS.c.name.label("worker")))
        return await self._all(WorkerTimer, statement.where(WORKER_TIMERS.c.id.in_(ids)))

    async def get_open(self, timer_id: str) -> RecordedTimer:
        """Return a waiting or paused timer.

        Raises:
            NotFoundError: there is none.
        """
        statement = select(TIMERS).where(TIMERS.c.id == timer_id, TIMERS.c.state.in_(OPEN_TIMER_STATES))
        timer = await self._one_or_none(RecordedTimer, statement)
        if timer is None:
            raise NotFoundError(f"there is no timer {timer_id!r}")
        return timer

    async def set_paused(self, timer_id: str, paused: bool) -> bool:
        """Keep a timer from firing, or let it fire again; False if it has ended or does not exist.

        A resumed timer whose time has passed is due.
        """
        return await self._set_state(timer_id, TimerState.PAUSED if paused else TimerState.WAITING)

    async def delete(self, timer_id: str) -> bool:
        """Cancel a waiting or paused timer; False if it has ended or does not exist."""
        return await self._set_state(timer_id, TimerState.CANCELLED)

    async def _set_state(self, timer_id: str, state: TimerState) -> bool:
        statement = (
            update(TIMERS)
            .where(TIMERS.c.id == timer_id, TIMERS.c.state.in_(OPEN_TIMER_STATES))
            .values(state=state)
        )
        return await self._count(statement) > 0

    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel the chat's waiting and paused timers; returns how many.

        Args:
            temporary: True cancels only the temporary one, False only the others, None all.
        """
        chosen = select(TIMERS.c.id).where(
            TIMERS.c.chat_key == chat_key, TIMERS.c.state.in_(OPEN_TIMER_STATES)
        )
        if temporary is not None:
            chosen = chosen.where(TIMERS.c.temporary.is_(temporary))
        # A timer that is firing at this moment is skipped: waiting for it here, possibly while holding
        # the chat's lock that its firing needs, would deadlock.
        ids = chosen.with_for_update(skip_locked=True).scalar_subquery()
        return await self._count(
            update(TIMERS).where(TIMERS.c.id.in_(ids)).values(state=TimerState.CANCELLED)
        )

    async def fire_due(self, *, limit: int) -> list[TimerInfo]:
        """Claim the timers that are due, the most overdue first; each is returned only once.

        Request their rounds in the same transaction.
        """
        due = (
            select(TIMERS.c.id)
            .where(TIMERS.c.state == TimerState.WAITING, TIMERS.c.fire_at <= now())
            .order_by(TIMERS.c.fire_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        statement = (
            update(TIMERS)
            .where(TIMERS.c.id.in_(chosen_once(due)))
            .values(state=TimerState.FIRED)
            .returning(TIMERS)
        )
        return sorted(await self._all(TimerInfo, statement), key=lambda timer: (timer.fire_at, timer.id))

    async def seconds_until_next(self) -> float | None:
        """Return the seconds until the next timer is due, 0 if one is; None without a waiting timer."""
        statement = select(func.min(TIMERS.c.fire_at), now()).where(TIMERS.c.state == TimerState.WAITING)
        return _pause(*(await self._connection.execute(statement)).one())


class CronJobRepository(Repository):
    """Rows of recurring timers; the caller interprets cron expressions."""

    async def add(self, job: CronJob) -> bool:
        """Add a job; False when the id is taken.

        Raises:
            ConflictError: the chat has no row.
        """
        statement = (
            insert(self._dialect, CRON_JOBS)
            .values(**values_of(job, CronJob))
            .on_conflict_do_nothing(index_elements=[CRON_JOBS.c.job_id])
            .returning(CRON_JOBS.c.job_id)
        )
        return await self._scalar(statement) is not None

    async def replace(self, job: CronJob) -> bool:
        """Replace everything but ``last_fired_at`` and ``created_at``; False when there is no such job."""
        values = values_of(job, CronJob)
        for kept in ("job_id", "last_fired_at", "created_at"):
            del values[kept]
        statement = update(CRON_JOBS).where(CRON_JOBS.c.job_id == job.job_id).values(**values)
        return await self._count(statement) > 0

    async def delete(self, job_id: str) -> bool:
        """Delete a job; False when there is none."""
        return await self._count(delete(CRON_JOBS).where(CRON_JOBS.c.job_id == job_id)) > 0

    async def find(self, job_id: str) -> CronJob | None:
        """Return the job, or None."""
        return await self._one_or_none(CronJob, select(CRON_JOBS).where(CRON_JOBS.c.job_id == job_id))

    async def of(self, ids: Collection[str]) -> list[CronJob]:
        """Return the jobs among some ids, in no order."""
        return await self._all(CronJob, select(CRON_JOBS).where(CRON_JOBS.c.job_id.in_(ids)))

    async def of_chat(self, chat_key: str | None) -> list[CronJob]:
        """List the jobs of a chat, or of all chats if it is None, the oldest first."""
        statement = select(CRON_JOBS)
        if chat_key is not None:
            statement = statement.where(CRON_JOBS.c.chat_key == chat_key)
        return await self._all(CronJob, statement.order_by(CRON_JOBS.c.created_at, CRON_JOBS.c.job_id))

    async def due(self, *, limit: int) -> list[CronJob]:
        """List the jobs that are due and lock them against other sweeps until this transaction ends.

        ``advance`` each and request its round in the same transaction.
        """
        statement = (
            select(CRON_JOBS)
            .where(CRON_JOBS.c.next_fire_at <= now())
            .order_by(CRON_JOBS.c.next_fire_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        return await self._all(CronJob, statement)

    async def advance(self, job: CronJob, *, next_fire_at: datetime | None) -> bool:
        """Record the firing at ``job.next_fire_at``; False when it is recorded already."""
        statement = (
            update(CRON_JOBS)
            .where(CRON_JOBS.c.job_id == job.job_id, CRON_JOBS.c.next_fire_at == job.next_fire_at)
            .values(next_fire_at=next_fire_at, last_fired_at=job.next_fire_at)
        )
        return await self._count(statement) > 0

    async def seconds_until_next(self) -> float | None:
        """Return the seconds until the next job is due, 0 if one is; None without a scheduled job."""
        statement = select(func.min(CRON_JOBS.c.next_fire_at), now())
        return _pause(*(await self._connection.execute(statement)).one())


def _of_live_workers(statement: Select[Any]) -> Select[Any]:
    return statement.join(WORKERS, WORKERS.c.id == WORKER_TIMERS.c.worker_id).where(
        ~is_free(WORKERS.c.lease_until)
    )


def _pause(due: datetime | None, time: datetime) -> float | None:
    return None if due is None else max(0.0, (due - time).total_seconds())
