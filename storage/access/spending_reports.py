"""Sums of what was spent, for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import func, select

from storage.repositories.base import Repository
from storage.tables import SPENDINGS

__all__ = ["CostSum", "SpendingReportRepository"]

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
    #: Requests of which tokens and cost are an estimate, those that are running included.
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
