"""Figures of the fleet: waiting and running work, and over time how turns ended and what was spent.

Each count of waiting work is read from an index."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, and_, case, exists, func, select
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from nekro_agent.ports import JobState
from storage.repositories.base import Repository, is_one_of
from storage.sql import now
from storage.states import ApprovalState, DeliveryState, RoundState
from storage.tables import (
    APPROVALS,
    JOBS,
    KEY_TURNS,
    PARKED_PROGRAMS,
    ROUNDS,
    SPENDINGS,
    WEBHOOK_DELIVERIES,
)

__all__ = [
    "CostSum",
    "OpenDeliveries",
    "OpenWork",
    "OverviewRepository",
    "SeriesRange",
    "SeriesRepository",
    "SpendingReportRepository",
    "SpentPoint",
    "TurnPoint",
]


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

    async def programs(self) -> OpenWork:
        """Count programs that wait without a process; none of them runs."""
        statement = select(func.count(), func.min(PARKED_PROGRAMS.c.parked_at), now()).where(
            PARKED_PROGRAMS.c.until.is_not(None)
        )
        count, oldest, time = (await self._connection.execute(statement)).one()
        return OpenWork(waiting=count, running=0, oldest_seconds=_seconds_since(oldest, time))

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


_ENDED: Final = (RoundState.DONE, RoundState.FAILED, RoundState.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class SeriesRange:
    """A range of time in intervals of one length, and how many rows may be read for it."""

    since: datetime
    until: datetime
    interval: timedelta
    #: The newest rows that are read; those before them are left out.
    most_rows: int

    def number_of(self, moment: ColumnElement[datetime]) -> ColumnElement[int]:
        """SQL: the number of the interval in which a time of the range lies, from 0."""
        begin = round(self.since.timestamp() * 1000)
        return (_milliseconds(moment) - begin) // round(self.interval.total_seconds() * 1000)


@dataclass(frozen=True, kw_only=True)
class _Point:
    #: Of the interval.
    number: int
    #: Rows that were read for the whole range, and the time of the oldest of them.
    rows: int
    oldest: datetime


@dataclass(frozen=True, kw_only=True)
class TurnPoint(_Point):
    """The turns that ended in an interval."""

    turns: int
    failed: int
    cancelled: int
    #: Half of them took at most so long, from the request to the end of the last round.
    turn_p50_ms: int
    #: 95 % of them took at most so long.
    turn_p95_ms: int


@dataclass(frozen=True, kw_only=True)
class SpentPoint(_Point):
    """What was spent in an interval, estimates of running work included."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float


class SeriesRepository(Repository):
    """Reads series by the index on time, at most ``SeriesRange.most_rows`` rows of it."""

    async def turns(self, span: SeriesRange, *, key_id: str | None = None) -> list[TurnPoint]:
        """List the intervals in which turns ended.

        A turn ends with its last round. One that was merged into a round of another turn does not count.

        Args:
            key_id: only turns that this key pays for; None: all.
        """
        statement = select(
            ROUNDS.c.turn_id, ROUNDS.c.number, ROUNDS.c.state, ROUNDS.c.finished_at.label("at")
        ).where(
            ROUNDS.c.finished_at >= span.since,
            ROUNDS.c.finished_at < span.until,
            is_one_of(ROUNDS.c.state, *_ENDED),
        )
        if key_id is not None:
            is_paid = exists().where(KEY_TURNS.c.turn_id == ROUNDS.c.turn_id, KEY_TURNS.c.key_id == key_id)
            statement = statement.where(is_paid)
        ended = statement.order_by(ROUNDS.c.finished_at.desc()).limit(span.most_rows).cte("ended")
        first, later = ROUNDS.alias(), ROUNDS.alias()
        goes_on = exists().where(
            later.c.turn_id == ended.c.turn_id,
            later.c.number > ended.c.number,
            later.c.state != RoundState.MERGED,
        )
        turns = (
            select(
                span.number_of(ended.c.at).label("number"),
                ended.c.state,
                (_milliseconds(ended.c.at) - _milliseconds(first.c.requested_at)).label("lasted"),
            )
            .join(first, first.c.id == ended.c.turn_id)
            .where(~goes_on)
            .cte("turns")
        )
        in_interval: dict[str, Any] = {"partition_by": turns.c.number}
        ranked = select(
            turns,
            func.row_number().over(**in_interval, order_by=turns.c.lasted).label("rank"),
            func.count().over(**in_interval).label("size"),
        ).subquery("ranked")

        def count(state: RoundState) -> ColumnElement[int]:
            return func.count(case((ranked.c.state == state, 1)))

        def percentile(percent: int) -> ColumnElement[int]:
            is_reached = ranked.c.rank * 100 >= ranked.c.size * percent
            return func.min(case((is_reached, ranked.c.lasted)))

        found = select(
            ranked.c.number,
            func.count().label("turns"),
            count(RoundState.FAILED).label("failed"),
            count(RoundState.CANCELLED).label("cancelled"),
            percentile(50).label("turn_p50_ms"),
            percentile(95).label("turn_p95_ms"),
            select(func.count()).select_from(ended).scalar_subquery().label("rows"),
            select(func.min(ended.c.at)).scalar_subquery().label("oldest"),
        )
        return await self._all(TurnPoint, found.group_by(ranked.c.number).order_by(ranked.c.number))

    async def spent(self, span: SeriesRange, *, key_id: str | None = None) -> list[SpentPoint]:
        """List the intervals in which something was spent.

        Args:
            key_id: only what this key pays for; None: everything.
        """
        names = ("requests", "prompt_tokens", "completion_tokens", "cost")
        statement = select(SPENDINGS.c.created_at.label("at"), *(SPENDINGS.c[name] for name in names))
        statement = statement.where(SPENDINGS.c.created_at >= span.since, SPENDINGS.c.created_at < span.until)
        if key_id is not None:
            statement = statement.where(SPENDINGS.c.key_id == key_id)
        entries = statement.order_by(SPENDINGS.c.created_at.desc()).limit(span.most_rows).cte("entries")
        number = span.number_of(entries.c.at).label("number")
        sums = [func.sum(entries.c[name]).label(name) for name in names]
        rows = select(func.count()).select_from(entries).scalar_subquery().label("rows")
        oldest = select(func.min(entries.c.at)).scalar_subquery().label("oldest")
        found = await self._rows(select(number, *sums, rows, oldest).group_by(number).order_by(number))
        return [
            SpentPoint(
                number=row[0],
                requests=int(row[1]),
                prompt_tokens=int(row[2]),
                completion_tokens=int(row[3]),
                cost=float(row[4]),
                rows=row[5],
                oldest=row[6],
            )
            for row in found
        ]


class _milliseconds(FunctionElement[int]):
    """Milliseconds since the epoch of a time."""

    type = BigInteger()
    inherit_cache = True


@compiles(_milliseconds, "postgresql")
def _milliseconds_postgresql(element: _milliseconds, compiler: SQLCompiler, **options: Any) -> str:
    return f"CAST(extract(epoch FROM {compiler.process(element.clauses, **options)}) * 1000 AS BIGINT)"


@compiles(_milliseconds, "sqlite")
def _milliseconds_sqlite(element: _milliseconds, compiler: SQLCompiler, **options: Any) -> str:
    # Days as a float are exact to 40 microseconds, so rounding gives the millisecond.
    days = f"julianday({compiler.process(element.clauses, **options)})"
    return f"CAST(round(({days} - 2440587.5) * 86400000.0) AS INTEGER)"


#: What sums can be grouped by: ``nekro_client.models.CostGroup``, which this package does not import.
_COLUMNS: Final = {
    "day": SPENDINGS.c.day,
    "chat": SPENDINGS.c.chat_key,
    "user": SPENDINGS.c.user_id,
    "key": SPENDINGS.c.key_id,
    "plugin": SPENDINGS.c.plugin_key,
    "model": SPENDINGS.c.model,
}


@dataclass(frozen=True, kw_only=True)
class CostSum:
    """What one group used; ``key`` is "" for what belongs to none."""

    key: str
    rounds: int
    requests: int
    #: Requests with estimated tokens and cost; running requests are among them.
    estimated_requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    sandbox_seconds: float


class SpendingReportRepository(Repository):
    """Sums of entries."""

    async def sums(
        self,
        by: str,
        *,
        since: str | None,
        until: str | None,
        after: str | None,
        limit: int,
        key_id: str | None = None,
    ) -> list[CostSum]:
        """Sum up the entries by day, chat, user, key, plugin or model, ordered by the group.

        Args:
            since, until: ISO dates (UTC), both included; None does not limit.
            after: only groups that follow this one; None begins at the first.
            key_id: only what this key pays for; None: everything.
        """
        key = func.coalesce(_COLUMNS[by], "")
        statement = select(
            key.label("key"),
            *(
                func.coalesce(func.sum(SPENDINGS.c[name]), 0).label(name)
                for name in (
                    "rounds",
                    "requests",
                    "estimated_requests",
                    "prompt_tokens",
                    "completion_tokens",
                )
            ),
            func.coalesce(func.sum(SPENDINGS.c.cost), 0.0).label("cost"),
            func.coalesce(func.sum(SPENDINGS.c.sandbox_seconds), 0.0).label("sandbox_seconds"),
        )
        if since is not None:
            statement = statement.where(SPENDINGS.c.day >= since)
        if until is not None:
            statement = statement.where(SPENDINGS.c.day <= until)
        if after is not None:
            statement = statement.where(key > after)
        if key_id is not None:
            statement = statement.where(SPENDINGS.c.key_id == key_id)
        rows = await self._rows(statement.group_by(key).order_by(key).limit(limit))
        return [
            CostSum(
                key=row[0],
                rounds=int(row[1]),
                requests=int(row[2]),
                estimated_requests=int(row[3]),
                prompt_tokens=int(row[4]),
                completion_tokens=int(row[5]),
                cost=float(row[6]),
                sandbox_seconds=float(row[7]),
            )
            for row in rows
        ]
