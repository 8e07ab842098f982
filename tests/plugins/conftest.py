"""Fixtures of the plugin tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from file_server import file_server
from plugin_world import AUTHORED, StartWorld, World, authored, spec_plugins, start_world
from queue_world import QueueSystem, QueueWorld

from nekro_agent.core.logger import configure

__all__ = ["authored", "file_server", "spec_plugins", "start_world"]


StartSystem = Callable[..., QueueSystem]


@pytest.fixture(scope="module")
def start_system(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Any, new_database: Callable[[str, Path], str]
) -> Iterator[StartSystem]:
    """Start a worker process with plugins; it serves the whole module, as idle workers cost time."""
    systems: list[QueueSystem] = []

    def start(*plugins: Path) -> QueueSystem:
        directory = tmp_path_factory.mktemp("queue")
        url = new_database("sqlite", directory)
        system = QueueSystem(directory, redis_url=redis_server.url, plugins=plugins, database_url=url)
        systems.append(system)
        system.prepare()
        return system

    yield start
    for system in systems:
        system.begin_stop()  # they stop concurrently
    for system in systems:
        system.close()


@pytest.fixture(scope="module")
def spec_system(start_system: StartSystem, spec_plugins: Path) -> QueueSystem:
    """A worker process with the documents' plugins. On SQLite: the SDK's stores are tested on both."""
    return start_system(spec_plugins)


@pytest.fixture(params=["memory", "queue"])
async def spec(
    request: pytest.FixtureRequest, spec_plugins: Path, start_world: StartWorld
) -> AsyncIterator[World]:
    """The documents' plugins, in memory and through the real queue."""
    if request.param == "memory":
        yield await start_world(spec_plugins)
        return
    async with QueueWorld.opened(request.getfixturevalue("spec_system")) as world:
        yield world


@pytest.fixture(scope="module")
def authored_system(start_system: StartSystem) -> QueueSystem:
    """One worker process with every plugin in ``authored/``."""
    return start_system(AUTHORED)


@pytest.fixture(params=["memory", "queue"])
async def anywhere(request: pytest.FixtureRequest, start_world: StartWorld) -> AsyncIterator[World]:
    """The plugins in ``authored/``, in memory and through the real queue."""
    if request.param == "memory":
        yield await start_world(AUTHORED)
        return
    async with QueueWorld.opened(request.getfixturevalue("authored_system")) as world:
        yield world


@pytest.fixture
async def on_queue(authored_system: QueueSystem) -> AsyncIterator[World]:
    """The plugins in ``authored/`` through the real queue only."""
    async with QueueWorld.opened(authored_system) as world:
        yield world


@pytest.fixture(autouse=True, scope="session")
def quiet_log() -> None:
    """Keep tracebacks of plugins that fail on purpose out of the report."""
    configure(level="CRITICAL")
