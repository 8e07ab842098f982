"""Counts of waiting and running work in the whole fleet, for operators; each is read from an index."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, case, func, select
from sqlalchemy.orm import InstrumentedAttribute

from nekro_agent.ports import JobState
from storage.clock import now
from storage.models import JobRow, RoundRow
from storage.repositories.base import Repository, is_one_of
from storage.states import RoundState

__all__ = ["OpenWork", "OverviewRepository"]


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """Work of one kind that has not ended."""

    waiting: int
    running: int
    #: How long the oldest waiting item has been due; 0 when none is waiting.
    oldest_seconds: float


class OverviewRepository(Repository):
    """Counts open work."""

    async def rounds(self) -> OpenWork:
        """Count due and running rounds."""
        is_due = and_(RoundRow.state == RoundState.REQUESTED, RoundRow.not_before <= now())
        return await self._open(
            RoundRow.state,
            waiting=is_due,
            running=RoundRow.state == RoundState.RUNNING,
            since=RoundRow.not_before,
            states=(RoundState.REQUESTED, RoundState.RUNNING),
        )

    async def jobs(self) -> OpenWork:
        """Count queued and running background jobs."""
        return await self._open(
            JobRow.state,
            waiting=JobRow.state == JobState.QUEUED,
            running=JobRow.state == JobState.RUNNING,
            since=JobRow.created_at,
            states=(JobState.QUEUED, JobState.RUNNING),
        )

    async def _open(
        self,
        state: InstrumentedAttribute[Any],
        *,
        waiting: ColumnElement[bool],
        running: ColumnElement[bool],
        since: InstrumentedAttribute[datetime],
        states: tuple[StrEnum, ...],
    ) -> OpenWork:
        statement = select(
            func.count(case((waiting, 1))),
            func.count(case((running, 1))),
            func.min(case((waiting, since))),
            now(),
        ).where(is_one_of(state, *states))
        count, active, oldest, time = (await self._connection.execute(statement)).one()
        seconds = 0.0 if oldest is None else max(0.0, (time - oldest).total_seconds())
        return OpenWork(waiting=count, running=active, oldest_seconds=seconds)
