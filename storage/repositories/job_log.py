"""The log of a background job: its attempts, its reports and what its code logged.

``JobRepository`` adds what it does to a job. A transaction that adds an entry has locked the job's row, so
numbers are not used twice. Reports and lines are kept if they are among the newest ``MOST_ENTRIES``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import delete, func, select

from storage.clock import now
from storage.repositories.base import Repository, is_one_of
from storage.states import JobLogKind
from storage.tables import JOB_LOG
from storage.upsert import insert

__all__ = ["MOST_CHARS", "MOST_ENTRIES", "JobLogEntry", "JobLogRepository", "NewJobLogEntry"]

#: Entries of a job among which reports and lines are kept.
MOST_ENTRIES: Final = 300
#: Characters of an entry that are kept.
MOST_CHARS: Final = 1000
#: Kinds of which a job can have any number; workers begin and end few attempts.
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
