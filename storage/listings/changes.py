"""Fingerprints of lists: values that differ when something that a list shows has changed.

Each is read from an index or from a small table, so that a gateway may read them every second.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Executable, bindparam, func, select

from storage.clock import now
from storage.driver.statements import FixedStatement
from storage.models import (
    ApiKeyRow,
    ApprovalRow,
    AuditRow,
    CallRow,
    ChatEventRow,
    CronJobRow,
    JobRow,
    McpServerRow,
    PluginStateRow,
    SpendingTotalRow,
    TimerRow,
    WorkerTimerRow,
)
from storage.repositories.base import Repository, is_one_of
from storage.states import OPEN_TIMER_STATES, CallState
from storage.types import UtcDateTime

__all__ = ["ChangeListing"]

#: How many of the calls that were decided last are part of the fingerprints; far more than people decide
#: between two readings.
_DECIDED_CALLS: Final = 100


class ChangeListing(Repository):
    """Reads fingerprints; compare one with an earlier one of the same method."""

    async def timers(self) -> dict[str, Hashable]:
        """Return a fingerprint per chat with timers that have not ended."""
        once: dict[str, set[Hashable]] = {}
        for kind, statement in enumerate((_timers, _cron_jobs, _worker_timers)):
            for row in await self._rows(statement):
                once.setdefault(row[0], set()).add((kind, *row[1:]))
        return {chat_key: frozenset(rows) for chat_key, rows in once.items()}

    async def approvals(self) -> dict[str, Hashable]:
        """Return a fingerprint per chat with approved calls that have not ended or were decided last.

        Requests and decisions are events of the chat, but the start and the end of an approved call are not.
        Calls that were decided last are included because one may begin and end between two readings.
        """
        found: dict[str, set[Hashable]] = {}
        for statement in (_approved_calls, _decided_calls):
            for row in await self._rows(statement):
                found.setdefault(row[0], set()).add(tuple(row[1:]))
        return {chat_key: frozenset(rows) for chat_key, rows in found.items()}

    async def jobs(self) -> Hashable:
        """Return a fingerprint of all jobs."""
        return await self._row(_jobs)

    async def plugins(self) -> Hashable:
        """Return a fingerprint of the operators' decisions on plugins."""
        return await self._row(_plugins)

    async def mcp_servers(self) -> Hashable:
        """Return a fingerprint of the declared MCP servers."""
        return await self._row(_mcp_servers)

    async def keys(self) -> Hashable:
        """Return a fingerprint of the keys; one that expires changes it."""
        return await self._row(_keys)

    async def costs(self) -> Hashable:
        """Return a fingerprint of what was spent."""
        return await self._row(_costs)

    async def audit(self) -> Hashable:
        """Return a fingerprint of the administrative acts."""
        return await self._row(_acts)

    async def recent_events(self, *, since: datetime) -> list[tuple[str, str, int]]:
        """Return chat, type and number of the newest event of each chat and type since a time."""
        rows = await self._rows(_recent_events, {"since": since})
        return [(row[0], row[1], row[2]) for row in rows]

    async def _row(self, statement: FixedStatement) -> tuple[Any, ...]:
        return tuple(next(iter(await self._rows(statement))))


@FixedStatement
def _timers(_dialect: str) -> Executable:
    row = TimerRow
    return (
        select(
            row.chat_key,
            row.state,
            func.count(),
            func.min(row.id),
            func.max(row.id),
            func.min(row.fire_at),
            func.max(row.fire_at),
            func.max(row.created_at),
        )
        .where(is_one_of(row.state, *OPEN_TIMER_STATES))
        .group_by(row.chat_key, row.state)
    )


@FixedStatement
def _worker_timers(_dialect: str) -> Executable:
    row = WorkerTimerRow
    return select(
        row.chat_key, func.count(), func.min(row.id), func.max(row.id), func.min(row.fire_at)
    ).group_by(row.chat_key)


@FixedStatement
def _cron_jobs(_dialect: str) -> Executable:
    row = CronJobRow
    return select(
        row.chat_key,
        func.count(),
        func.count(row.next_fire_at),
        func.max(row.updated_at),
        func.max(row.last_fired_at),
        func.max(row.next_fire_at),
    ).group_by(row.chat_key)


@FixedStatement
def _approved_calls(_dialect: str) -> Executable:
    # An approved call that has ended is not open any more, so its group's count changes.
    is_open = is_one_of(CallRow.state, CallState.QUEUED, CallState.RUNNING)
    return (
        select(ApprovalRow.chat_key, CallRow.state, func.count(), func.max(CallRow.requested_at))
        .join(ApprovalRow, ApprovalRow.call_id == CallRow.id)
        .where(is_open)
        .group_by(ApprovalRow.chat_key, CallRow.state)
    )


@FixedStatement
def _decided_calls(_dialect: str) -> Executable:
    # Chosen by number and not by age, which would change a fingerprint while nothing happens.
    return (
        select(ApprovalRow.chat_key, ApprovalRow.sequence, CallRow.state)
        .join(CallRow, ApprovalRow.call_id == CallRow.id)
        .where(ApprovalRow.decided_at.is_not(None))
        .order_by(ApprovalRow.decided_at.desc())
        .limit(_DECIDED_CALLS)
    )


@FixedStatement
def _jobs(_dialect: str) -> Executable:
    return select(func.max(JobRow.updated_at))


@FixedStatement
def _plugins(_dialect: str) -> Executable:
    row = PluginStateRow
    return select(func.count(), func.sum(row.revision), func.max(row.changed_at)).select_from(row)


@FixedStatement
def _mcp_servers(_dialect: str) -> Executable:
    row = McpServerRow
    return select(
        func.count(), func.sum(row.revision), func.max(row.updated_at), func.max(row.listed_at)
    ).select_from(row)


@FixedStatement
def _keys(_dialect: str) -> Executable:
    row = ApiKeyRow
    is_over = row.expires_at <= now()
    return select(
        func.count(), func.count(row.revoked_at), func.count().filter(is_over), func.max(row.created_at)
    ).select_from(row)


@FixedStatement
def _costs(_dialect: str) -> Executable:
    return select(func.max(SpendingTotalRow.updated_at))


@FixedStatement
def _acts(_dialect: str) -> Executable:
    return select(func.max(AuditRow.sequence))


@FixedStatement
def _recent_events(_dialect: str) -> Executable:
    row = ChatEventRow
    return (
        select(row.chat_key, row.type, func.max(row.number))
        .where(row.created_at > bindparam("since", type_=UtcDateTime()), row.number > 0)
        .group_by(row.chat_key, row.type)
    )
