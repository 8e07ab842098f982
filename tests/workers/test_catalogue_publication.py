"""A worker goes on publishing what it serves, and following MCP servers, after an attempt that failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.catalogue import CatalogueReader
from nekro.extensions.mcp.follower import McpPart
from nekro.extensions.mcp.rows import ServerRows
from nekro.plugins.importing import Imported
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.plugin import NekroPlugin
from storage.caller_reads import read_workers
from workers.services import WorkerServices

Logged = list[tuple[str, dict[str, Any]]]


@pytest.fixture
async def services(
    make_settings: Callable[..., Settings], migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path
) -> AsyncIterator[WorkerServices]:
    """The services of a worker in this process."""
    (tmp_path / "plugins").mkdir()
    settings = make_settings(
        database=migrated_copy("sqlite").model_dump(),
        plugins={"dirs": (tmp_path / "plugins",), "load_shipped": False},
    )
    services = WorkerServices.load(settings, role="methods")
    await services.start()
    yield services
    await services.close()


async def published(services: WorkerServices) -> set[str]:
    """Keys of the plugins in the catalogue."""
    catalogue = await CatalogueReader(services.database).read()
    return {plugin.key for plugin in catalogue.plugins}


async def test_a_plugin_that_is_served_later_than_it_is_listed_is_published(
    services: WorkerServices, logged: Logged
) -> None:
    plugin = NekroPlugin("P", "later", "", "1", "tests", "")
    services.loaded.add(Imported(path="later.py", module="", package="", key=plugin.key, plugin=plugin))
    await eventually(
        lambda: "catalogue_not_published" in [event for event, _ in logged],
        what="an attempt between the two steps",
    )
    services.host.use(services.loaded.plugins)
    services.plugins_changed()

    async def is_published() -> bool:
        return plugin.key in await published(services)

    await eventually(is_published, what="the plugin in the catalogue")


async def test_servers_that_were_declared_during_an_outage_become_plugins(
    services: WorkerServices, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = next(part.servers for part in services.extensions if isinstance(part, McpPart))
    wants, asked = servers._is_wanted, list[str]()

    async def fails_once(plugin: NekroPlugin) -> bool:
        asked.append(plugin.key)
        if len(asked) == 2:  # after that of the first server
            raise StorageUnavailableError("gone")
        return await wants(plugin)

    monkeypatch.setattr(servers, "_is_wanted", fails_once)
    async with services.database.begin() as tx:
        for name in ("one", "two"):
            await ServerRows(tx.connection).put(name, {"url": "http://127.0.0.1:1/mcp"}, is_enabled=True)

    async def are_published() -> bool:
        return {"mcp.one", "mcp.two"} <= await published(services)

    await eventually(are_published, what="both servers in the catalogue")
    assert "mcp_servers_not_read" in [event for event, _ in logged]


async def test_a_worker_that_leaves_during_a_publication_is_gone(
    services: WorkerServices, logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, begun, may_end = services.publisher_of_catalogue, threading.Event(), threading.Event()
    snapshots = publisher._snapshots

    def slowly() -> Any:
        begun.set()
        may_end.wait(WAIT_SECONDS)
        return snapshots()

    monkeypatch.setattr(publisher, "_snapshots", slowly)
    publisher._forget()  # the next check publishes again
    await asyncio.to_thread(begun.wait, WAIT_SECONDS)
    leaving = asyncio.create_task(publisher.close())
    await asyncio.wait([leaving], timeout=0.5)
    may_end.set()
    await leaving
    await eventually(lambda: "catalogue_published" in [event for event, _ in logged], what="its publication")
    async with services.database.read() as tx:
        assert [worker.is_live for worker in await read_workers(tx.connection)] == [False]
