"""Leases: one holder in the fleet for as long as it renews.

A lease expires by the database's clock. Each acquisition increments the fencing token and writes with
an old token are refused, so a holder that was suspended and resumes cannot corrupt state.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, or_, select, update

from storage.clock import now, seconds_from_now
from storage.models import LeaseColumns, LeaseRow
from storage.repositories.base import Repository
from storage.upsert import insert

__all__ = ["Lease", "LeaseRepository", "is_free", "is_held_by", "release_values", "take_values"]


def is_free(row: type[LeaseColumns]) -> ColumnElement[bool]:
    """SQL: the lease is not held, or it has expired."""
    return or_(row.lease_until.is_(None), row.lease_until < now())


def is_held_by(row: type[LeaseColumns], fence: int | BindParameter[int]) -> ColumnElement[bool]:
    """SQL: the lease was neither released nor acquired again since ``fence`` was issued.

    An expired lease stays with its holder until another one acquires it.
    """
    return (row.fence == fence) & row.lease_until.is_not(None)


def take_values(row: type[LeaseColumns], *, owner: str, lease_seconds: float) -> dict[str, Any]:
    """SQL values of an acquisition."""
    return {"owner": owner, "lease_until": seconds_from_now(lease_seconds), "fence": row.fence + 1}


def release_values() -> dict[str, Any]:
    """SQL values of a release."""
    return {"owner": None, "lease_until": None}


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A named lease; ``owner`` and ``lease_until`` are None when it was released."""

    name: str
    owner: str | None
    lease_until: datetime | None
    fence: int


class LeaseRepository(Repository):
    """Leases by name: for the sweep, pinned plugins and initialisations."""

    async def acquire(self, name: str, *, owner: str, lease_seconds: float) -> int | None:
        """Acquire a free lease; returns its fencing token, None when the lease is held.

        A second attempt by the holder returns None too: it is another task of the same owner.
        """
        new = insert(self._dialect, LeaseRow).values(
            name=name, owner=owner, lease_until=seconds_from_now(lease_seconds), fence=1
        )
        statement = new.on_conflict_do_update(
            index_elements=[LeaseRow.name],
            set_=take_values(LeaseRow, owner=owner, lease_seconds=lease_seconds),
            where=is_free(LeaseRow),
        ).returning(LeaseRow.fence)
        fence: int | None = await self._scalar(statement)
        return fence

    async def renew(self, name: str, *, fence: int, lease_seconds: float) -> bool:
        """Renew a lease from now on; False when another holder has it."""
        statement = (
            update(LeaseRow)
            .where(LeaseRow.name == name, is_held_by(LeaseRow, fence))
            .values(lease_until=seconds_from_now(lease_seconds))
        )
        return await self._count(statement) > 0

    async def release(self, name: str, *, fence: int) -> bool:
        """Release a lease; False when another holder has it."""
        statement = (
            update(LeaseRow)
            .where(LeaseRow.name == name, is_held_by(LeaseRow, fence))
            .values(**release_values())
        )
        return await self._count(statement) > 0

    async def find(self, name: str) -> Lease | None:
        """Return the lease; None while it is free."""
        statement = select(LeaseRow).where(LeaseRow.name == name, ~is_free(LeaseRow))
        return await self._one_or_none(Lease, statement)

    async def held(self, *, prefix: str, limit: int) -> list[Lease]:
        """List the held leases whose names begin with ``prefix``, ordered by name."""
        statement = (
            select(LeaseRow)
            .where(LeaseRow.name.startswith(prefix, autoescape=True), ~is_free(LeaseRow))
            .order_by(LeaseRow.name)
            .limit(limit)
        )
        return await self._all(Lease, statement)
