"""Administrative acts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select

from storage.clock import now
from storage.repositories.base import Repository
from storage.tables import AUDIT
from storage.upsert import insert

__all__ = ["AuditRepository", "RecordedAct"]


@dataclass(frozen=True, kw_only=True)
class RecordedAct:
    """An administrative act."""

    sequence: int
    at: datetime
    key_id: str | None
    action: str
    subject: str
    data: dict[str, Any] | None
    request_id: str | None


class AuditRepository(Repository):
    """Rows of acts, which are never changed."""

    async def add(
        self,
        action: str,
        subject: str,
        *,
        key_id: str | None,
        request_id: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Record an act, in the transaction of the act if it has one, else before it."""
        await self._rows(
            insert(self._dialect, AUDIT).values(
                at=now(), key_id=key_id, action=action, subject=subject, data=data, request_id=request_id
            )
        )

    async def newest(
        self, *, limit: int, before: int | None = None, action: str | None = None, subject: str | None = None
    ) -> list[RecordedAct]:
        """List acts, the newest first.

        Args:
            before: only acts with a smaller sequence; None does not limit.
            action: only acts whose action begins with it, such as ``dead_letter.``; None means all.
            subject: only acts on this; None means all.
        """
        statement = select(AUDIT).order_by(AUDIT.c.sequence.desc()).limit(limit)
        if before is not None:
            statement = statement.where(AUDIT.c.sequence < before)
        if action is not None:
            statement = statement.where(AUDIT.c.action.startswith(action, autoescape=True))
        if subject is not None:
            statement = statement.where(AUDIT.c.subject == subject)
        return await self._all(RecordedAct, statement)
