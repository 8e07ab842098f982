"""MCP servers: declarations of operators, and what workers found out about the servers.

A row whose declaration is None belongs to a server that files of workers declare; it has the listing only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Executable, case, delete, or_, select, update

from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, found
from storage.sql import insert, now, seconds_from_now
from storage.tables import MCP_SERVERS

__all__ = ["ServerRows", "StoredServer"]


@dataclass(frozen=True, kw_only=True)
class StoredServer:
    """One row; see ``MCP_SERVERS``."""

    name: str
    declaration: dict[str, Any] | None
    is_enabled: bool
    listed_digest: str | None
    tools: str | None
    about: dict[str, Any] | None
    listed_at: datetime | None
    error: str | None
    revision: int
    updated_at: datetime


class ServerRows(Repository):
    """Rows of MCP servers, at most one per name."""

    async def all(self) -> list[StoredServer]:
        """List every row, ordered by name."""
        return await self._all(StoredServer, select(MCP_SERVERS).order_by(MCP_SERVERS.c.name))

    async def revisions(self) -> dict[str, int]:
        """Return the revision of each row; it changes when a worker has to build the plugin again."""
        return {name: revision for name, revision in await self._rows(_revisions_statement)}

    async def find(self, name: str) -> StoredServer | None:
        """Return a row, or None."""
        return await self._one_or_none(StoredServer, select(MCP_SERVERS).where(MCP_SERVERS.c.name == name))

    async def put(self, name: str, declaration: dict[str, Any], *, is_enabled: bool) -> StoredServer:
        """Add or replace a declaration; the listing of the one before stays until a worker lists again."""
        new = insert(self._dialect, MCP_SERVERS).values(
            name=name, declaration=declaration, is_enabled=is_enabled, revision=1, updated_at=now()
        )
        await self._rows(
            new.on_conflict_do_update(
                index_elements=[MCP_SERVERS.c.name],
                set_={
                    "declaration": new.excluded.declaration,
                    "is_enabled": new.excluded.is_enabled,
                    "revision": MCP_SERVERS.c.revision + 1,
                    "updated_at": new.excluded.updated_at,
                },
            )
        )
        return found(await self.find(name), "MCP server", name)

    async def remove(self, name: str) -> bool:
        """Delete a row with a declaration; False if there is none."""
        declared = (MCP_SERVERS.c.name == name) & MCP_SERVERS.c.declaration.is_not(None)
        return await self._count(delete(MCP_SERVERS).where(declared)) > 0

    async def take(self, name: str, *, digest: str, seconds: float) -> bool:
        """Acquire the right to list a server; False if a listing began in the last ``seconds``.

        With a declaration that no worker has tried yet it is always given, to one worker.
        """
        new = insert(self._dialect, MCP_SERVERS).values(
            name=name, is_enabled=True, listed_digest=digest, revision=1, updated_at=now(), listed_at=now()
        )
        is_due = or_(
            MCP_SERVERS.c.listed_at.is_(None),
            MCP_SERVERS.c.listed_at < seconds_from_now(-seconds),
            MCP_SERVERS.c.listed_digest.is_distinct_from(digest),
        )
        upsert = new.on_conflict_do_update(
            index_elements=[MCP_SERVERS.c.name],
            set_={
                "listed_at": new.excluded.listed_at,
                "error": case((MCP_SERVERS.c.listed_digest == digest, MCP_SERVERS.c.error), else_=None),
                "listed_digest": digest,
            },
            where=is_due,
        ).returning(MCP_SERVERS.c.name)
        return await self._scalar(upsert) is not None

    async def listed(self, name: str, *, digest: str, tools: str, about: dict[str, Any]) -> bool:
        """Record the tools of a server; True if workers have to build its plugin again.

        Args:
            digest: of the declaration that was used.
        """
        is_other = or_(
            MCP_SERVERS.c.tools.is_distinct_from(tools),
            MCP_SERVERS.c.error.is_not(None),
            MCP_SERVERS.c.listed_digest.is_distinct_from(digest),
        )
        is_changed = await self._record(
            name, is_other, listed_digest=digest, tools=tools, about=about, error=None
        )
        if not is_changed:  # no worker needs what else it says about itself
            await self._count(update(MCP_SERVERS).where(MCP_SERVERS.c.name == name).values(about=about))
        return is_changed

    async def failed(self, name: str, *, digest: str, error: str) -> bool:
        """Record that a server could not be listed; its tools stay as they were listed before.

        True if the error is another one than before.
        """
        is_other = or_(
            MCP_SERVERS.c.error.is_distinct_from(error), MCP_SERVERS.c.listed_digest.is_distinct_from(digest)
        )
        return await self._record(name, is_other, listed_digest=digest, error=error)

    async def _record(self, name: str, is_other: Any, **values: Any) -> bool:
        new = insert(self._dialect, MCP_SERVERS).values(
            name=name, is_enabled=True, revision=1, updated_at=now(), listed_at=now(), **values
        )
        upsert = new.on_conflict_do_update(
            index_elements=[MCP_SERVERS.c.name],
            set_={
                **{column: new.excluded[column] for column in (*values, "listed_at", "updated_at")},
                "revision": MCP_SERVERS.c.revision + 1,
            },
            where=is_other,
        ).returning(MCP_SERVERS.c.name)
        if await self._scalar(upsert) is not None:
            return True
        await self._count(update(MCP_SERVERS).where(MCP_SERVERS.c.name == name).values(listed_at=now()))
        return False


@FixedStatement
def _revisions_statement(_dialect: str) -> Executable:
    return select(MCP_SERVERS.c.name, MCP_SERVERS.c.revision)
