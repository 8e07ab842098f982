"""Timers of chats, once and recurring: each firing is handed out once in the whole fleet.

The sweep takes what is due and requests the round in the same transaction, so a firing is
neither lost nor doubled when its worker dies.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, select, update

from storage.clock import now
from storage.models import CronJobRow, TimerRow
from storage.repository import Repository, found, new_id
from storage.states import TimerState
from storage.upsert import insert

__all__ = ["CronJob", "CronJobRepository", "NewCronJob", "Timer", "TimerRepository"]

_EDITABLE: Final = frozenset({"cron_expr", "timezone", "workday_mode", "title", "description"})


@dataclass(frozen=True, kw_only=True)
class Timer:
    """A one-time timer."""

    id: str
    chat_key: str
    fire_at: datetime
    description: str
    #: At most one temporary timer waits per chat; a new one replaces it.
    temporary: bool
    state: TimerState
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class NewCronJob:
    """A recurring timer to add."""

    chat_key: str
    cron_expr: str
    timezone: str
    description: str
    #: When it fires first, None: it begins paused. The caller reads the cron expression.
    next_fire_at: datetime | None
    workday_mode: str = "none"
    title: str | None = None
    id: str = field(default_factory=lambda: new_id()[:12])


@dataclass(frozen=True, kw_only=True)
class CronJob(NewCronJob):
    """A recurring timer."""

    last_fired_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def paused(self) -> bool:
        """Whether it does not fire until it is resumed."""
        return self.next_fire_at is None


class TimerRepository(Repository):
    """Rows of one-time timers."""

    async def add(
        self, chat_key: str, *, fire_at: datetime, description: str, temporary: bool = False
    ) -> Timer:
        """Add a timer; a temporary one replaces the chat's waiting temporary one.

        Raises:
            ConflictError: the chat has no row.
        """
        if temporary:
            await self.clear(chat_key, temporary=True)
        statement = (
            insert(self._dialect, TimerRow)
            .values(
                id=new_id(),
                chat_key=chat_key,
                fire_at=fire_at,
                description=description,
                temporary=temporary,
                state=TimerState.WAITING,
                created_at=now(),
            )
            .returning(TimerRow)
        )
        return found(await self._one_or_none(Timer, statement), "timer of chat", chat_key)

    async def of_chat(self, chat_key: str) -> list[Timer]:
        """List the chat's waiting timers, the next one first."""
        statement = select(TimerRow).where(
            TimerRow.chat_key == chat_key, TimerRow.state == TimerState.WAITING
        )
        return await self._all(Timer, statement.order_by(TimerRow.fire_at, TimerRow.id))

    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel the chat's waiting timers; returns how many.

        Args:
            temporary: only the temporary one, or only the other ones; None means all.
        """
        statement = update(TimerRow).where(
            TimerRow.chat_key == chat_key, TimerRow.state == TimerState.WAITING
        )
        if temporary is not None:
            statement = statement.where(TimerRow.temporary.is_(temporary))
        return await self._count(statement.values(state=TimerState.CANCELLED))

    async def fire_due(self, *, limit: int) -> list[Timer]:
        """Take the timers that are due, the most overdue first; nobody gets them again.

        Request their rounds in the same transaction.
        """
        due = (
            select(TimerRow.id)
            .where(TimerRow.state == TimerState.WAITING, TimerRow.fire_at <= now())
            .order_by(TimerRow.fire_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        statement = (
            update(TimerRow)
            .where(TimerRow.id.in_(due.scalar_subquery()))
            .values(state=TimerState.FIRED)
            .returning(TimerRow)
        )
        return sorted(await self._all(Timer, statement), key=lambda timer: (timer.fire_at, timer.id))


class CronJobRepository(Repository):
    """Rows of recurring timers; what a cron expression means is the caller's to know."""

    async def add(self, job: NewCronJob) -> CronJob:
        """Add a job.

        Raises:
            ConflictError: the id is taken, or the chat has no row.
        """
        values = {item.name: getattr(job, item.name) for item in dataclasses.fields(NewCronJob)}
        statement = (
            insert(self._dialect, CronJobRow)
            .values(**values, created_at=now(), updated_at=now())
            .returning(CronJobRow)
        )
        return found(await self._one_or_none(CronJob, statement), "cron job", job.id)

    async def update(self, job_id: str, *, next_fire_at: datetime | None, **changes: Any) -> CronJob:
        """Change ``cron_expr``, ``timezone``, ``workday_mode``, ``title`` or ``description``.

        Args:
            next_fire_at: when it fires next after the change; None pauses it.

        Raises:
            NotFoundError: there is no such job.
        """
        if unknown := changes.keys() - _EDITABLE:
            raise TypeError(f"a cron job's {', '.join(sorted(unknown))} cannot be changed")
        return found(
            await self._change(job_id, {**changes, "next_fire_at": next_fire_at}), "cron job", job_id
        )

    async def delete(self, job_id: str) -> bool:
        """Delete a job; False when there is none."""
        return await self._count(delete(CronJobRow).where(CronJobRow.id == job_id)) > 0

    async def find(self, job_id: str) -> CronJob | None:
        """Return the job, or None."""
        return await self._one_or_none(CronJob, select(CronJobRow).where(CronJobRow.id == job_id))

    async def get(self, job_id: str) -> CronJob:
        """Return the job.

        Raises:
            NotFoundError: there is none.
        """
        return found(await self.find(job_id), "cron job", job_id)

    async def of_chat(self, chat_key: str) -> list[CronJob]:
        """List the chat's jobs, the oldest first."""
        statement = select(CronJobRow).where(CronJobRow.chat_key == chat_key)
        return await self._all(CronJob, statement.order_by(CronJobRow.created_at, CronJobRow.id))

    async def due(self, *, limit: int) -> list[CronJob]:
        """List the jobs that are due and keep them from other sweeps until this transaction ends.

        ``advance`` each and request its round in the same transaction.
        """
        statement = (
            select(CronJobRow)
            .where(CronJobRow.next_fire_at <= now())
            .order_by(CronJobRow.next_fire_at)
            .limit(limit)
            .with_for_update(skip_locked=True)
        )
        return await self._all(CronJob, statement)

    async def advance(self, job: CronJob, *, next_fire_at: datetime | None) -> bool:
        """Record the firing that ``job.next_fire_at`` announced; False when it is recorded already."""
        statement = (
            update(CronJobRow)
            .where(CronJobRow.id == job.id, CronJobRow.next_fire_at == job.next_fire_at)
            .values(next_fire_at=next_fire_at, last_fired_at=job.next_fire_at)
        )
        return await self._count(statement) > 0

    async def _change(self, job_id: str, values: dict[str, Any]) -> CronJob | None:
        statement = update(CronJobRow).where(CronJobRow.id == job_id)
        return await self._one_or_none(
            CronJob, statement.values(**values, updated_at=now()).returning(CronJobRow)
        )
