"""Workers with what they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select

from nekro_agent.ports import JobState
from storage.repositories.base import Repository, is_one_of
from storage.states import CallState, RoundState
from storage.tables import CALLS, JOBS, ROUNDS, WORKERS

__all__ = ["ListedWorker", "WorkerListing"]


@dataclass(frozen=True, kw_only=True)
class ListedWorker:
    """What a worker's row says besides the catalogue."""

    id: str
    release: str | None
    #: When it is no longer live unless it renews its lease; None: it has stopped.
    lease_until: datetime | None


class WorkerListing(Repository):
    """Reads workers for lists."""

    async def by_id(self, worker_ids: Collection[str]) -> dict[str, ListedWorker]:
        """Return workers by their ids."""
        statement = select(WORKERS.c.id, WORKERS.c.release, WORKERS.c.lease_until)
        rows = await self._all(ListedWorker, statement.where(WORKERS.c.id.in_(worker_ids)))
        return {row.id: row for row in rows}

    async def running(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Count the recorded calls, rounds and jobs that run, by the name of their worker.

        Calls of TOOL methods have no row, so they are not counted.
        """
        calls = select(CALLS.c.worker, func.count()).where(
            is_one_of(CALLS.c.state, CallState.QUEUED, CallState.RUNNING), CALLS.c.state == CallState.RUNNING
        )
        rounds = select(ROUNDS.c.worker, func.count()).where(
            is_one_of(ROUNDS.c.state, RoundState.REQUESTED, RoundState.RUNNING),
            ROUNDS.c.state == RoundState.RUNNING,
        )
        jobs = select(JOBS.c.worker, func.count()).where(
            is_one_of(JOBS.c.state, JobState.QUEUED, JobState.RUNNING), JOBS.c.state == JobState.RUNNING
        )
        found = []
        for statement, column in ((calls, CALLS.c.worker), (rounds, ROUNDS.c.worker), (jobs, JOBS.c.worker)):
            rows = await self._rows(statement.group_by(column))
            found.append(Counter({row[0]: row[1] for row in rows if row[0] is not None}))
        return found[0], found[1], found[2]
