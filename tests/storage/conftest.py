"""A migrated database for each test, copied from one that is migrated once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from broker_config.settings import DatabaseSettings
from storage.engine import Database
from storage.migrate import upgrade


@pytest.fixture(scope="session")
def migrated_copy(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], DatabaseSettings]:
    """Make a migrated database of a kind; migrations run once per kind and session."""
    templates: dict[str, Any] = {}

    def copy(kind: str) -> DatabaseSettings:
        return _copy_sqlite() if kind == "sqlite" else _copy_postgres()

    def _copy_sqlite() -> DatabaseSettings:
        if "sqlite" not in templates:
            templates["sqlite"] = tmp_path_factory.mktemp("template") / "template.db"
            url = f"sqlite:///{templates['sqlite']}"
            asyncio.run(upgrade(DatabaseSettings(url=url), Path()))
        target = tmp_path_factory.mktemp("database") / "test.db"
        shutil.copyfile(templates["sqlite"], target)
        return DatabaseSettings(url=f"sqlite:///{target}")

    def _copy_postgres() -> DatabaseSettings:
        server = request.getfixturevalue("postgres_server")
        if "postgres" not in templates:
            templates["postgres"] = server.create_database()
            asyncio.run(upgrade(DatabaseSettings(url=templates["postgres"]), Path()))
        name = _database_name(templates["postgres"])
        copy_name = f"{name}_{len(templates)}"
        templates[copy_name] = True
        with psycopg.connect(server.uri, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{copy_name}" TEMPLATE "{name}"')
        return DatabaseSettings(url=templates["postgres"].replace(f"/{name}?", f"/{copy_name}?"))

    return copy


def _database_name(url: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])


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
    """Make every lease end as if its holder had given no sign of life: no test waits for the clock."""

    async def run_out() -> None:
        async with database.begin() as tx:
            for table in ("chats", "leases", "calls", "jobs"):
                await tx.connection.exec_driver_sql(
                    f"UPDATE {table} SET lease_until = '2000-01-01 00:00:00.000000'"
                    " WHERE lease_until IS NOT NULL"
                )

    return run_out
