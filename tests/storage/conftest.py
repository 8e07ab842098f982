"""A migrated database for each test, copied from one that is migrated once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cut_proxy import CutProxy

from broker_config.settings import DatabaseSettings
from storage.engine import Database


@pytest.fixture(params=["sqlite", "postgres"])
def migrated_settings(
    request: pytest.FixtureRequest, migrated_copy: Callable[[str], DatabaseSettings]
) -> DatabaseSettings:
    """Settings of a fresh, migrated database of each kind."""
    return migrated_copy(request.param)


@pytest.fixture
async def database(migrated_settings: DatabaseSettings, tmp_path: Path) -> AsyncIterator[Database]:
    """A fresh, migrated database of each kind."""
    database = Database(migrated_settings, tmp_path)
    yield database
    await database.dispose()


@pytest.fixture
def let_leases_run_out(database: Database) -> Callable[[], Awaitable[None]]:
    """Expire every lease, as if its holder had stopped renewing it; no test waits for the clock."""

    async def run_out() -> None:
        async with database.begin() as tx:
            for table in ("chats", "leases", "calls", "jobs"):
                await tx.connection.exec_driver_sql(
                    f"UPDATE {table} SET lease_until = '2000-01-01 00:00:00.000000'"
                    " WHERE lease_until IS NOT NULL"
                )

    return run_out


@pytest.fixture
async def proxied(migrated_copy: Any, tmp_path: Path) -> AsyncIterator[tuple[Database, CutProxy]]:
    """A database behind a proxy that cuts connections, and the proxy."""
    proxy = CutProxy(migrated_copy("postgres"))
    database = Database(await proxy.start(), tmp_path)
    yield database, proxy
    await database.dispose()
    await proxy.stop()
