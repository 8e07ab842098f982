"""A migrated database for each test, copied from one that is migrated once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings
from storage.engine import Database
from storage.migrate import upgrade
from storage.models import Base


@pytest.fixture(scope="session")
def migrated_copy(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], DatabaseSettings]:
    """Make an empty, migrated database of a kind; migrations run once per kind and session."""
    templates: dict[str, DatabaseSettings] = {}

    def template(kind: str, url: Callable[[], str]) -> DatabaseSettings:
        if kind not in templates:
            templates[kind] = DatabaseSettings(url=url(), pool_timeout_seconds=WAIT_SECONDS)
            # In a thread, as the test that asks may have a loop running in this one.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, upgrade(templates[kind], Path())).result()
        return templates[kind]

    def sqlite() -> DatabaseSettings:
        directory = tmp_path_factory.mktemp("database")
        made = template("sqlite", lambda: f"sqlite:///{directory}/template.db")
        target = directory / "test.db"
        shutil.copyfile(str(made.url).removeprefix("sqlite:///"), target)
        return made.model_copy(update={"url": f"sqlite:///{target}"})

    def postgres() -> DatabaseSettings:
        # One database, emptied: to create one takes PostgreSQL longer than most tests take.
        made = template("postgres", request.getfixturevalue("postgres_server").create_database)
        with psycopg.connect(str(made.url), autocommit=True) as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(f'DELETE FROM "{table.name}"')  # type: ignore[call-overload]
        return made

    return lambda kind: sqlite() if kind == "sqlite" else postgres()


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
