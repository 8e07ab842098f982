"""Methods that were sent to another lane, by the watchdog or by a person."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select

from nekro_agent.methods import Lane
from storage.clock import now
from storage.models import MethodMarkRow
from storage.repository import Repository
from storage.states import MarkSource
from storage.upsert import insert

__all__ = ["MethodMark", "MethodMarkRepository"]


@dataclass(frozen=True, kw_only=True)
class MethodMark:
    """Where a method runs, and why."""

    #: Task name ``author.module.function``.
    method: str
    lane: Lane
    reason: str
    source: MarkSource
    marked_at: datetime


class MethodMarkRepository(Repository):
    """Rows of marks, one per method."""

    async def mark_blocking(self, method: str, *, lane: Lane, reason: str) -> bool:
        """Record what the watchdog saw; False when an operator's mark stands, which is left alone."""
        return await self._write(method, lane, reason, MarkSource.WATCHDOG)

    async def pin(self, method: str, *, lane: Lane, reason: str) -> None:
        """Record an operator's decision, which the watchdog does not change."""
        await self._write(method, lane, reason, MarkSource.OPERATOR)

    async def clear(self, method: str) -> bool:
        """Remove a method's mark; False when it has none."""
        return await self._count(delete(MethodMarkRow).where(MethodMarkRow.method == method)) > 0

    async def all(self) -> list[MethodMark]:
        """List every mark, by method; there are at most as many as methods."""
        return await self._all(MethodMark, select(MethodMarkRow).order_by(MethodMarkRow.method))

    async def _write(self, method: str, lane: Lane, reason: str, source: MarkSource) -> bool:
        new = insert(self._dialect, MethodMarkRow).values(
            method=method, lane=lane, reason=reason, source=source, marked_at=now()
        )
        may_replace = (MethodMarkRow.source == MarkSource.WATCHDOG) | (source == MarkSource.OPERATOR)
        statement = new.on_conflict_do_update(
            index_elements=[MethodMarkRow.method],
            set_={name: new.excluded[name] for name in ("lane", "reason", "source", "marked_at")},
            where=may_replace,
        ).returning(MethodMarkRow.method)
        return await self._scalar(statement) is not None
