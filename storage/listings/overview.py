"""Counts of waiting and running work in the whole fleet, for operators; each is read from an index."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, case, exists, func, select

from nekro_agent.ports import JobState
from storage.repositories.base import Repository, is_one_of
from storage.sql import now
from storage.states import ApprovalState, DeliveryState, RoundState
from storage.tables import APPROVALS, JOBS, ROUNDS, WEBHOOK_DELIVERIES

__all__ = ["OpenDeliveries", "OpenWork", "OverviewRepository"]


@dataclass(frozen=True, kw_only=True)
class OpenWork:
    """Work of one kind that has not ended."""

    waiting: int
    running: int
    #: How long the oldest item that waits for a worker has been due; 0 when none does.
    oldest_seconds: float


@dataclass(frozen=True, kw_only=True)
class OpenDeliveries:
    """Deliveries to webhooks that have not succeeded."""

    waiting: int
    #: Dead letters that can be replayed.
    dead: int
    #: Age of the oldest one that waits; 0 when none does.
    oldest_seconds: float
    #: How long the oldest due one has waited for a gateway to take it; 0 when none is due.
    overdue_seconds: float


class OverviewRepository(Repository):
    """Counts open work."""

    async def deliveries(self) -> OpenDeliveries:
        """Count deliveries to webhooks."""
        row = WEBHOOK_DELIVERIES.c
        is_waiting = row.state == DeliveryState.WAITING
        statement = select(
            func.count(case((is_waiting, 1))),
            func.count(case((row.state == DeliveryState.DEAD, 1))),
            func.min(case((is_waiting, row.created_at))),
            func.min(case((is_waiting, row.due_at))),
            now(),
        ).where(is_one_of(row.state, DeliveryState.WAITING, DeliveryState.DEAD))
        waiting, dead, oldest, due, time = (await self._connection.execute(statement)).one()
        return OpenDeliveries(
            waiting=waiting,
            dead=dead,
            oldest_seconds=_seconds_since(oldest, time),
            overdue_seconds=_seconds_since(due, time),
        )

    async def rounds(self) -> OpenWork:
        """Count due and running rounds.

        The age is that of rounds that wait for a worker, not for the running round of their chat.
        """
        is_due = and_(ROUNDS.c.state == RoundState.REQUESTED, ROUNDS.c.not_before <= now())
        running = ROUNDS.alias()
        is_behind = exists().where(
            running.c.chat_key == ROUNDS.c.chat_key, running.c.state == RoundState.RUNNING
        )
        return await self._open(
            ROUNDS.c.state,
            waiting=is_due,
            aging=and_(is_due, ~is_behind),
            running=ROUNDS.c.state == RoundState.RUNNING,
            since=ROUNDS.c.not_before,
            states=(RoundState.REQUESTED, RoundState.RUNNING),
        )

    async def jobs(self) -> OpenWork:
        """Count queued and running background jobs."""
        return await self._open(
            JOBS.c.state,
            waiting=JOBS.c.state == JobState.QUEUED,
            running=JOBS.c.state == JobState.RUNNING,
            since=JOBS.c.created_at,
            states=(JobState.QUEUED, JobState.RUNNING),
        )

    async def approvals(self) -> OpenWork:
        """Count calls that wait for the approval of a person; none of them runs."""
        return await self._open(
            APPROVALS.c.state,
            waiting=APPROVALS.c.state == ApprovalState.PENDING,
            running=APPROVALS.c.state != ApprovalState.PENDING,
            since=APPROVALS.c.requested_at,
            states=(ApprovalState.PENDING,),
        )

    async def _open(
        self,
        state: ColumnElement[Any],
        *,
        waiting: ColumnElement[bool],
        running: ColumnElement[bool],
        since: ColumnElement[datetime],
        states: tuple[StrEnum, ...],
        aging: ColumnElement[bool] | None = None,
    ) -> OpenWork:
        statement = select(
            func.count(case((waiting, 1))),
            func.count(case((running, 1))),
            func.min(case((waiting if aging is None else aging, since))),
            now(),
        ).where(is_one_of(state, *states))
        count, active, oldest, time = (await self._connection.execute(statement)).one()
        return OpenWork(waiting=count, running=active, oldest_seconds=_seconds_since(oldest, time))


def _seconds_since(moment: datetime | None, time: datetime) -> float:
    return 0.0 if moment is None else max(0.0, (time - moment).total_seconds())
