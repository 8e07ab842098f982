"""Fixtures of the plugin tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_server import file_server
from plugin_world import StartWorld, World, authored, spec_plugins, start_world
from queue_world import QueueSystem, QueueWorld

from nekro_agent.core.logger import configure

__all__ = ["authored", "file_server", "spec_plugins", "start_world"]


@pytest.fixture(scope="session")
def queue_system(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any, spec_plugins: Path
) -> Iterator[QueueSystem]:
    """A worker process with the documents' plugins."""
    system = QueueSystem(tmp_path_factory.mktemp("queue"), redis_url=redis_server.url, plugins=spec_plugins)
    system.prepare()
    yield system
    system.stop_worker()


@pytest.fixture(params=["memory", "queue"])
async def spec(
    request: pytest.FixtureRequest, spec_plugins: Path, start_world: StartWorld
) -> AsyncIterator[World]:
    """The documents' plugins, in memory and through the real queue."""
    if request.param == "memory":
        yield await start_world(spec_plugins)
        return
    async with QueueWorld.opened(request.getfixturevalue("queue_system")) as world:
        yield world


@pytest.fixture(autouse=True, scope="session")
def quiet_log() -> None:
    """Plugins that fail on purpose should not fill the report with tracebacks."""
    configure(level="CRITICAL")
