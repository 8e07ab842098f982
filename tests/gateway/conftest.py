"""Gateways on the session's Redis and a database of the module, served over sockets."""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gateway_server import served
from worker_fleet import Fleet

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.services import Services
from nekro.gateway.app import create_app

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    """A fleet without workers; a test or a module starts those that it needs."""
    return make_fleet()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.extended)])
def fresh_fleet(
    request: pytest.FixtureRequest,
    redis_server: Any,
    migrated_copy: Callable[[str], DatabaseSettings],
    tmp_path: Path,
) -> Iterator[Fleet]:
    """A fleet without workers, on a database of its own."""
    settings = Settings.load(
        env_file=None,
        data_dir=tmp_path / "data",
        broker={"url": redis_server.url, "key_prefix": f"t{uuid.uuid4().hex}:"},
        database=migrated_copy(request.param),
        security={"signing_key": "test-signing-key"},
        plugins={"dirs": (PLUGINS,)},
    )
    fleet = Fleet(settings, tmp_path)
    yield fleet
    fleet.stop()


@pytest.fixture
async def gateway(fresh_fleet: Fleet) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """A gateway on a fleet without workers, whose database has no keys; its client has the local key."""
    async with served(create_app(fresh_fleet.settings)) as client:
        yield fresh_fleet, client


@pytest.fixture
async def services(fresh_fleet: Fleet) -> AsyncIterator[Services]:
    """Services on the fleet's database, in this process."""
    services = fresh_fleet.services()
    await services.start()
    yield services
    await services.close()


@pytest.fixture
async def http(fresh_fleet: Fleet, services: Services) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway of the fleet, with the local key."""
    async with served(create_app(fresh_fleet.settings)) as client:
        yield client
