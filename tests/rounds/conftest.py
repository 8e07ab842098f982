"""A bench for rounds on each database; a fleet of processes where one process does not suffice."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from round_bench import Bench
from waiting import WAIT_SECONDS

from broker_config.settings import DatabaseSettings, Settings
from nekro_agent.errors import SandboxUnavailableError
from nekro_agent.methods import Lane
from storage.tables import metadata
from workers.services import WorkerServices

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(scope="session")
def rounds_database(
    tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[str, Path], str]
) -> Callable[[str], DatabaseSettings]:
    """Return the session's migrated database of a kind."""

    @functools.cache
    def settings(kind: str) -> DatabaseSettings:
        url = new_database(kind, tmp_path_factory.mktemp("rounds"))
        return DatabaseSettings(url=url, pool_timeout_seconds=WAIT_SECONDS)

    return settings


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.extended)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def open_bench(
    make_settings: Callable[..., Settings], rounds_database: Callable[[str], DatabaseSettings]
) -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """Open a bench on an empty database of a kind; settings by group."""
    opened: list[WorkerServices] = []

    async def open_(kind: str, **groups: Any) -> Bench:
        database = rounds_database(kind).model_dump() | groups.pop("database", {})
        values = {"plugins": {"dirs": (PLUGINS,)}, "agent": {"lease_seconds": 30}, **groups}
        settings = make_settings(database=database, **values)
        services = WorkerServices.load(settings, role=Lane.ROUNDS.value)
        opened.append(services)
        async with services.database.begin() as tx:
            for table in reversed(metadata.sorted_tables):
                await tx.connection.execute(table.delete())
        await services.start()
        try:
            return Bench(services, await services.sandboxes())
        except SandboxUnavailableError as exc:
            pytest.skip(f"no sandbox on this machine: {exc}")

    yield open_
    for services in opened:
        await services.close()


@pytest.fixture
async def bench(kind: str, open_bench: Callable[..., Awaitable[Bench]]) -> Bench:
    """A bench with the usual settings."""
    return await open_bench(kind)
