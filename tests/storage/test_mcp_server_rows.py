"""Rows of MCP servers on both databases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings
from nekro.extensions.mcp.rows import ServerRows
from storage.engine import Database

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_listings_follow_declarations(
    kind: str, migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> None:
    database = Database(migrated_copy(kind), tmp_path)
    async with database.autocommit() as transaction:
        servers = ServerRows(transaction.connection)
        # A server of a file has a row once a worker lists it; of two workers one does.
        assert await servers.take("file", digest="d1", seconds=60)
        assert not await servers.take("file", digest="d1", seconds=60)
        assert await servers.take("file", digest="d2", seconds=60)
        assert await servers.listed("file", digest="d2", tools="[]", about={"name": "n"})
        before = await servers.revisions()
        assert not await servers.listed("file", digest="d2", tools="[]", about={"name": "n"})
        assert await servers.revisions() == before
        assert await servers.failed("file", digest="d2", error="gone\x00")
        assert not await servers.failed("file", digest="d2", error="gone\x00")
        row = await servers.find("file")
        assert row is not None and (row.error, row.tools, row.declaration) == ("gone\x00", "[]", None)
        assert row.revision == before["file"] + 1
        assert not await servers.remove("file")
        # An attempt with another declaration forgets the error of the one before.
        assert await servers.take("file", digest="d3", seconds=60)
        row = await servers.find("file")
        assert row is not None and row.error is None
        put = await servers.put("own", {"command": "a"}, is_enabled=True)
        assert (put.declaration, put.revision) == ({"command": "a"}, 1)
        again = await servers.put("own", {"command": "b"}, is_enabled=False)
        assert (again.declaration, again.is_enabled, again.revision) == ({"command": "b"}, False, 2)
        assert [one.name for one in await servers.all()] == ["file", "own"]
        assert await servers.remove("own")
    await database.dispose()
