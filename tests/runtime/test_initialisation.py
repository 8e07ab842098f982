"""Init hooks: once per process, and in one process of the fleet at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from broker_config.settings import DatabaseSettings
from nekro_agent.hooks import PluginHost
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from workers.background import BackgroundLoop
from workers.initialisation import start_plugins
from workers.lanes import LaneChooser
from workers.loader import LoadedPlugins
from workers.marks import MethodMarks


class Process:
    """What one worker process has of its own: connections, plugins, a host."""

    def __init__(self, number: int, database: Database, background: BackgroundLoop) -> None:
        self.owner = f"worker-{number}"
        self.database = database
        self.plugin = NekroPlugin("m", "migrating", "", "1", "Ada")
        self.host = PluginHost([self.plugin])
        self.loaded = LoadedPlugins([])
        self.failures: list[str] = []
        self._lanes = LaneChooser()
        self._marks = MethodMarks(database, background, self._lanes, on_pinned=lambda _: None)

    async def start(self) -> None:
        await start_plugins(
            self.host, self.loaded, self.database, owner=self.owner, lanes=self._lanes, marks=self._marks
        )


@pytest.fixture
def processes(
    database: Database, background: BackgroundLoop, kind_settings: DatabaseSettings, tmp_path: Path
) -> list[Process]:
    return [Process(number, Database(kind_settings, tmp_path), background) for number in range(4)]


async def test_no_two_processes_are_inside_an_init_at_once(processes: list[Process]) -> None:
    inside: set[str] = set()
    order: list[tuple[str, str]] = []
    for process in processes:

        @process.plugin.mount_init_method()
        async def migrate(owner: str = process.owner) -> None:
            order.append(("begin", owner))
            inside.add(owner)
            for _ in range(5):
                await asyncio.sleep(0.01)  # a migration takes its time; the others try meanwhile
                assert inside == {owner}
            inside.remove(owner)
            order.append(("end", owner))

    await asyncio.gather(*(process.start() for process in processes))
    assert [event for event, _ in order] == ["begin", "end"] * 4
    assert sorted({owner for _, owner in order}) == [process.owner for process in processes]
    for process in processes:
        await process.database.dispose()


async def test_an_init_that_fails_lets_the_next_process_try(processes: list[Process]) -> None:
    tried: list[str] = []
    for process in processes:

        @process.plugin.mount_init_method()
        async def fail(owner: str = process.owner) -> None:
            tried.append(owner)
            raise RuntimeError("the service is away")

        process.loaded.add_error = (  # type: ignore[method-assign]
            lambda key, error, process=process: process.failures.append(f"{key}: {error}")
        )
    for process in processes:
        await process.start()
        await process.database.dispose()
    assert tried == [process.owner for process in processes]
    expected = ["Ada.migrating: init hook: RuntimeError: the service is away"]
    assert [process.failures for process in processes] == [expected] * 4
