"""Fingerprints of lists: values that differ when something that a list shows has changed.

Each is read from an index or from a small table, so that a gateway may read them every second.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Executable, bindparam, func, select

from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, is_one_of
from storage.sql import UtcDateTime, now
from storage.states import OPEN_TIMER_STATES, CallState
from storage.tables import (
    API_KEYS,
    APPROVALS,
    AUDIT,
    CALLS,
    CHAT_EVENTS,
    CRON_JOBS,
    JOBS,
    MCP_SERVERS,
    PLUGIN_STATES,
    SPENDING_TOTALS,
    TIMERS,
    WORKER_TIMERS,
)

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
    row = TIMERS.c
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
    row = WORKER_TIMERS.c
    return select(
        row.chat_key, func.count(), func.min(row.id), func.max(row.id), func.min(row.fire_at)
    ).group_by(row.chat_key)


@FixedStatement
def _cron_jobs(_dialect: str) -> Executable:
    row = CRON_JOBS.c
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
    is_open = is_one_of(CALLS.c.state, CallState.QUEUED, CallState.RUNNING)
    return (
        select(APPROVALS.c.chat_key, CALLS.c.state, func.count(), func.max(CALLS.c.requested_at))
        .join(APPROVALS, APPROVALS.c.call_id == CALLS.c.id)
        .where(is_open)
        .group_by(APPROVALS.c.chat_key, CALLS.c.state)
    )


@FixedStatement
def _decided_calls(_dialect: str) -> Executable:
    # Chosen by number and not by age, which would change a fingerprint while nothing happens.
    return (
        select(APPROVALS.c.chat_key, APPROVALS.c.sequence, CALLS.c.state)
        .join(CALLS, APPROVALS.c.call_id == CALLS.c.id)
        .where(APPROVALS.c.decided_at.is_not(None))
        .order_by(APPROVALS.c.decided_at.desc())
        .limit(_DECIDED_CALLS)
    )


@FixedStatement
def _jobs(_dialect: str) -> Executable:
    return select(func.max(JOBS.c.updated_at))


@FixedStatement
def _plugins(_dialect: str) -> Executable:
    row = PLUGIN_STATES.c
    return select(func.count(), func.sum(row.revision), func.max(row.changed_at)).select_from(PLUGIN_STATES)


@FixedStatement
def _mcp_servers(_dialect: str) -> Executable:
    row = MCP_SERVERS.c
    return select(
        func.count(), func.sum(row.revision), func.max(row.updated_at), func.max(row.listed_at)
    ).select_from(MCP_SERVERS)


@FixedStatement
def _keys(_dialect: str) -> Executable:
    row = API_KEYS.c
    is_over = row.expires_at <= now()
    return select(
        func.count(), func.count(row.revoked_at), func.count().filter(is_over), func.max(row.created_at)
    ).select_from(API_KEYS)


@FixedStatement
def _costs(_dialect: str) -> Executable:
    return select(func.max(SPENDING_TOTALS.c.updated_at))


@FixedStatement
def _acts(_dialect: str) -> Executable:
    return select(func.max(AUDIT.c.sequence))


@FixedStatement
def _recent_events(_dialect: str) -> Executable:
    row = CHAT_EVENTS.c
    return (
        select(row.chat_key, row.type, func.max(row.number))
        .where(row.created_at > bindparam("since", type_=UtcDateTime()), row.number > 0)
        .group_by(row.chat_key, row.type)
    )
