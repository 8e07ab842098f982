"""The log of a background job, and the signals to it: what people and other processes follow and send.

``JobRepository`` logs what it does to a job, besides the job's reports and what its code logged. A
transaction that adds an entry has locked the job's row, so numbers are not used twice. Reports and lines are
kept if they are among the newest ``MOST_ENTRIES``.

Signals and waits are rows, so that any process can signal or cancel. A signal is a row of ``job_signals``
with the key ``data:<key>``, a wait a row ``wait:<key>`` with the name of its waiter. Cancelling deletes the
wait and a new wait replaces it; the waiter notices either at its next poll. All rows of a job are deleted
when the job ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import delete, exists, func, select

from storage.repositories.base import Repository, is_one_of
from storage.sql import insert, now
from storage.states import JobLogKind
from storage.tables import JOB_LOG, JOB_SIGNALS, JOBS

__all__ = [
    "MOST_CHARS",
    "MOST_ENTRIES",
    "JobLogEntry",
    "JobLogRepository",
    "JobSignalRepository",
    "NewJobLogEntry",
    "SignalView",
    "WaitState",
]


#: Entries of a job among which reports and lines are kept.
MOST_ENTRIES: Final = 300
#: Characters of an entry that are kept.
MOST_CHARS: Final = 1000
#: A job can have any number of entries of these kinds; workers begin and end few attempts.
_BOUNDED: Final = (JobLogKind.REPORT, JobLogKind.LINE, JobLogKind.CANCEL_REQUESTED)


@dataclass(frozen=True, kw_only=True)
class NewJobLogEntry:
    """An entry to add."""

    kind: JobLogKind
    attempt: int
    text: str = ""
    worker: str | None = None
    #: 0 to 100, of a report.
    percent: int | None = None
    #: Of a log record.
    level: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobLogEntry(NewJobLogEntry):
    """An entry of a job's log."""

    number: int
    at: datetime


class JobLogRepository(Repository):
    """Entries of the logs of jobs."""

    async def add(self, job_id: str, *entries: NewJobLogEntry) -> None:
        """Append entries; the transaction has locked the job's row."""
        if not entries:
            return
        newest = select(func.max(JOB_LOG.c.number)).where(JOB_LOG.c.job_id == job_id)
        last = await self._scalar(newest) or 0
        rows = [
            {
                **vars(entry),
                "text": entry.text[:MOST_CHARS],
                "job_id": job_id,
                "number": last + place,
                "at": now(),
            }
            for place, entry in enumerate(entries, 1)
        ]
        await self._rows(insert(self._dialect, JOB_LOG).values(rows))
        if (first := last + len(rows) - MOST_ENTRIES) > 0:
            old = (
                JOB_LOG.c.job_id == job_id,
                JOB_LOG.c.number <= first,
                is_one_of(JOB_LOG.c.kind, *_BOUNDED),
            )
            await self._rows(delete(JOB_LOG).where(*old))

    async def of_job(self, job_id: str) -> Sequence[JobLogEntry]:
        """List the entries of a job, the oldest first."""
        statement = select(JOB_LOG).where(JOB_LOG.c.job_id == job_id)
        return await self._all(JobLogEntry, statement.order_by(JOB_LOG.c.number))


_WAIT: Final = "wait:"

_DATA: Final = "data:"


class WaitState(StrEnum):
    """The state of a wait when its waiter polls."""

    #: No signal has arrived yet.
    WAITING = "waiting"
    #: The signal has arrived and can be taken.
    READY = "ready"
    #: The wait was cancelled or replaced by another one, or the job has ended.
    CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True)
class SignalView:
    """The result of ``take``; ``data`` is valid only when the state is READY."""

    state: WaitState
    data: Any | None = None


class JobSignalRepository(Repository):
    """Signals of jobs and the waits for them."""

    async def signal(self, job_id: str, *, key: str, data: Any | None) -> None:
        """Store data for a job, whether or not there is a wait yet; replaces an earlier signal of the key.

        Raises:
            ConflictError: there is no such job.
        """
        await self._put(job_id, _DATA + key, data)

    async def begin(self, job_id: str, *, key: str, waiter: str) -> None:
        """Register a wait; it replaces another wait for the same key.

        Raises:
            ConflictError: there is no such job.
        """
        await self._put(job_id, _WAIT + key, waiter)

    async def look(self, job_id: str, *, key: str, waiter: str) -> WaitState:
        """Return the state of a wait; reads only, so that polling causes no writes."""
        statement = select(JOB_SIGNALS.c.key, JOB_SIGNALS.c.data).where(
            JOB_SIGNALS.c.job_id == job_id, JOB_SIGNALS.c.key.in_((_WAIT + key, _DATA + key))
        )
        rows: dict[str, Any] = dict(await self._connection.execute(statement))
        if rows.get(_WAIT + key) != waiter:
            return WaitState.CANCELLED
        return WaitState.READY if _DATA + key in rows else WaitState.WAITING

    async def take(self, job_id: str, *, key: str, waiter: str) -> SignalView:
        """Remove the signal and end the wait; a signal for a later waiter stays."""
        wait = JOB_SIGNALS.alias()
        is_mine = exists().where(wait.c.job_id == job_id, wait.c.key == _WAIT + key, wait.c.data == waiter)
        statement = (
            delete(JOB_SIGNALS)
            .where(JOB_SIGNALS.c.job_id == job_id, JOB_SIGNALS.c.key == _DATA + key, is_mine)
            .returning(JOB_SIGNALS.c.data)
        )
        row = (await self._connection.execute(statement)).first()
        if row is None:
            return SignalView(state=await self.look(job_id, key=key, waiter=waiter))
        await self.end(job_id, key=key, waiter=waiter)
        return SignalView(state=WaitState.READY, data=row[0])

    async def end(self, job_id: str, *, key: str, waiter: str) -> None:
        """Delete a wait that its waiter gave up; another waiter's wait for the same key stays."""
        await self._count(
            delete(JOB_SIGNALS).where(
                JOB_SIGNALS.c.job_id == job_id,
                JOB_SIGNALS.c.key == _WAIT + key,
                JOB_SIGNALS.c.data == waiter,
            )
        )

    async def waiting_keys(self, job_id: str, *, key: str | None = None) -> list[str]:
        """List the keys that are waited for; only ``key`` when it is not None."""
        statement = select(JOB_SIGNALS.c.key).where(*self._waits(job_id, key)).order_by(JOB_SIGNALS.c.key)
        found = (await self._connection.execute(statement)).scalars()
        return [name.removeprefix(_WAIT) for name in found]

    async def waiting(self, key: str, *, chat_key: str | None, limit: int) -> list[str]:
        """List the jobs that wait for a key.

        Args:
            chat_key: only jobs of this chat; None: of all.
        """
        statement = select(JOB_SIGNALS.c.job_id).where(JOB_SIGNALS.c.key == _WAIT + key).limit(limit)
        if chat_key is not None:
            statement = statement.join(JOBS).where(JOBS.c.chat_key == chat_key)
        return list((await self._connection.execute(statement)).scalars())

    async def cancel(self, job_id: str, *, key: str | None = None) -> int:
        """Cancel the wait for ``key``, or all of the job's; returns how many."""
        return await self._count(delete(JOB_SIGNALS).where(*self._waits(job_id, key)))

    async def clear(self, job_id: str) -> None:
        """Delete all signals and waits of a job that ends."""
        await self._count(delete(JOB_SIGNALS).where(JOB_SIGNALS.c.job_id == job_id))

    async def _put(self, job_id: str, key: str, data: Any | None) -> None:
        new = insert(self._dialect, JOB_SIGNALS).values(job_id=job_id, key=key, data=data, created_at=now())
        replaced = {name: new.excluded[name] for name in ("data", "created_at")}
        await self._count(
            new.on_conflict_do_update(index_elements=[JOB_SIGNALS.c.job_id, JOB_SIGNALS.c.key], set_=replaced)
        )

    @staticmethod
    def _waits(job_id: str, key: str | None) -> tuple[Any, ...]:
        of_job = JOB_SIGNALS.c.job_id == job_id
        if key is None:
            return of_job, JOB_SIGNALS.c.key.startswith(_WAIT, autoescape=True)
        return of_job, JOB_SIGNALS.c.key == _WAIT + key
