"""Fixtures of the SDK's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from file_server import FileServer, file_server

from nekro_agent.core.logger import configure
from nekro_agent.files.file_system import FileSystem
from nekro_agent.plugin import NekroPlugin
from nekro_agent.testing import InMemoryRuntime

__all__ = ["file_server"]


@pytest.fixture(autouse=True, scope="session")
def quiet_log() -> None:
    """Keep tracebacks of plugins that fail on purpose out of the report."""
    configure(level="CRITICAL")


def make_plugin(name: str = "sample", author: str = "Ada", **values: object) -> NekroPlugin:
    return NekroPlugin(name, name, "", "1", author, "", **values)  # type: ignore[arg-type]


@pytest.fixture
def plugin() -> NekroPlugin:
    return make_plugin()


@pytest.fixture
async def world(plugin: NekroPlugin, tmp_path: Path) -> AsyncIterator[InMemoryRuntime]:
    """A bound runtime with that plugin; downloads may reach this machine."""
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data", downloads=FileServer.policy) as world:
        yield world


@pytest.fixture
def fs(world: InMemoryRuntime, plugin: NekroPlugin) -> FileSystem:
    """The plugin's files."""
    return world.context(plugin_key=plugin.key).fs
