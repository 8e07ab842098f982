"""Signals that jobs are given, and who waits for them: rows, so that any process can signal or cancel.

A signal lies in ``job_signals`` under ``data:<key>``, a wait under ``wait:<key>`` with the name of
its waiter. Whoever cancels deletes the wait, whoever waits anew replaces it, and
the waiter learns it when it looks next. All of a job's rows go when the job ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import delete, exists, select
from sqlalchemy.orm import aliased

from storage.clock import now
from storage.models import JobSignalRow
from storage.repository import Repository
from storage.upsert import insert

__all__ = ["JobSignalRepository", "SignalView", "WaitState"]

_WAIT: Final = "wait:"
_DATA: Final = "data:"


class WaitState(StrEnum):
    """What a waiter finds when it looks."""

    #: Nothing came yet.
    WAITING = "waiting"
    #: The signal is there, to be taken.
    READY = "ready"
    #: Somebody cancelled the wait, waits in this one's place, or the job has ended.
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class SignalView:
    """What ``take`` brought; ``data`` means something when the state is READY."""

    state: WaitState
    data: Any | None = None


class JobSignalRepository(Repository):
    """Signals of jobs and the waits for them."""

    async def signal(self, job_id: str, *, key: str, data: Any | None) -> None:
        """Leave data for a job, whether or not somebody waits for it yet; replaces what was left before.

        Raises:
            ConflictError: there is no such job.
        """
        await self._put(job_id, _DATA + key, data)

    async def begin(self, job_id: str, *, key: str, waiter: str) -> None:
        """Register a wait; it takes the place of another one for the same key.

        Raises:
            ConflictError: there is no such job.
        """
        await self._put(job_id, _WAIT + key, waiter)

    async def look(self, job_id: str, *, key: str, waiter: str) -> WaitState:
        """Say how a wait stands; reads only, so that waiting costs no writes."""
        statement = select(JobSignalRow.key, JobSignalRow.data).where(
            JobSignalRow.job_id == job_id, JobSignalRow.key.in_((_WAIT + key, _DATA + key))
        )
        rows: dict[str, Any] = {row.key: row.data for row in await self._connection.execute(statement)}
        if rows.get(_WAIT + key) != waiter:
            return WaitState.CANCELLED
        return WaitState.READY if _DATA + key in rows else WaitState.WAITING

    async def take(self, job_id: str, *, key: str, waiter: str) -> SignalView:
        """Take the signal and end the wait; it stays for the other one when the wait is another's by now."""
        wait = aliased(JobSignalRow)
        is_mine = exists().where(wait.job_id == job_id, wait.key == _WAIT + key, wait.data == waiter)
        statement = (
            delete(JobSignalRow)
            .where(JobSignalRow.job_id == job_id, JobSignalRow.key == _DATA + key, is_mine)
            .returning(JobSignalRow.data)
        )
        row = (await self._connection.execute(statement)).one_or_none()
        if row is None:
            return SignalView(state=await self.look(job_id, key=key, waiter=waiter))
        await self.end(job_id, key=key, waiter=waiter)
        return SignalView(state=WaitState.READY, data=row.data)

    async def end(self, job_id: str, *, key: str, waiter: str) -> None:
        """Forget a wait that its waiter gave up; another one for the same key stays."""
        await self._count(
            delete(JobSignalRow).where(
                JobSignalRow.job_id == job_id,
                JobSignalRow.key == _WAIT + key,
                JobSignalRow.data == waiter,
            )
        )

    async def waiting_keys(self, job_id: str, *, key: str | None = None) -> list[str]:
        """List the keys that somebody waits for, or the one given if somebody does."""
        statement = select(JobSignalRow.key).where(*self._waits(job_id, key)).order_by(JobSignalRow.key)
        found = (await self._connection.execute(statement)).scalars()
        return [name.removeprefix(_WAIT) for name in found]

    async def cancel(self, job_id: str, *, key: str | None = None) -> int:
        """Cancel the wait for ``key``, or all of the job's; returns how many."""
        return await self._count(delete(JobSignalRow).where(*self._waits(job_id, key)))

    async def clear(self, job_id: str) -> None:
        """Forget all signals and cancel all waits of a job that ends."""
        await self._count(delete(JobSignalRow).where(JobSignalRow.job_id == job_id))

    async def _put(self, job_id: str, key: str, data: Any | None) -> None:
        new = insert(self._dialect, JobSignalRow).values(job_id=job_id, key=key, data=data, created_at=now())
        replaced = {name: new.excluded[name] for name in ("data", "created_at")}
        await self._count(
            new.on_conflict_do_update(index_elements=[JobSignalRow.job_id, JobSignalRow.key], set_=replaced)
        )

    @staticmethod
    def _waits(job_id: str, key: str | None) -> tuple[Any, ...]:
        of_job = JobSignalRow.job_id == job_id
        if key is None:
            return of_job, JobSignalRow.key.startswith(_WAIT, autoescape=True)
        return of_job, JobSignalRow.key == _WAIT + key
