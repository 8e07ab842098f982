"""Init hooks run once per process, and in one process of the fleet at a time."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import select, update

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import FencedError
from nekro_agent.execution.hooks import PluginHost
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from storage.models import LeaseRow
from workers.leases.keeper import LeaseKeeper
from workers.plugins import initialisation
from workers.plugins.initialisation import start_plugins
from workers.plugins.lane_overrides import MethodMarks
from workers.plugins.lanes import LaneChooser
from workers.plugins.loader import LoadedPlugins
from workers.pools.background import BackgroundLoop


class Process:
    """State of one worker process: connections, plugins, a host."""

    def __init__(self, number: int, database: Database, background: BackgroundLoop) -> None:
        self.owner = f"worker-{number}"
        self.database = database
        self._background = background
        self.plugin = NekroPlugin("m", "migrating", "", "1", "Ada")
        self.host = PluginHost([self.plugin])
        self.loaded = LoadedPlugins([])
        self.failures: list[str] = []
        self._lanes = LaneChooser()
        self._marks = MethodMarks(database, background, self._lanes, on_pinned=lambda _: None)

    async def start(self) -> None:
        await start_plugins(
            self.host,
            self.loaded,
            LeaseKeeper(self.database, self._background),
            owner=self.owner,
            lanes=self._lanes,
            marks=self._marks,
        )


@pytest.fixture
def processes(
    database: Database, background: BackgroundLoop, kind_settings: DatabaseSettings, tmp_path: Path
) -> list[Process]:
    return [Process(number, Database(kind_settings, tmp_path), background) for number in range(4)]


async def test_no_two_processes_run_an_init_hook_at_once(processes: list[Process]) -> None:
    inside: set[str] = set()
    order: list[tuple[str, str]] = []
    for process in processes:

        @process.plugin.mount_init_method()
        async def migrate(owner: str = process.owner) -> None:
            order.append(("begin", owner))
            inside.add(owner)
            for _ in range(5):
                await asyncio.sleep(0.01)  # a migration takes time; the others try meanwhile
                assert inside == {owner}
            inside.remove(owner)
            order.append(("end", owner))

    await asyncio.gather(*(process.start() for process in processes))
    assert [event for event, _ in order] == ["begin", "end"] * 4
    assert sorted({owner for _, owner in order}) == [process.owner for process in processes]
    for process in processes:
        await process.database.dispose()


async def test_a_failed_init_lets_the_next_process_try(processes: list[Process]) -> None:
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


async def lease_until(database: Database) -> object:
    async with database.read() as tx:
        return (await tx.connection.execute(select(LeaseRow.lease_until))).scalar_one()


async def test_a_blocking_init_keeps_the_lease(
    processes: list[Process], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialisation, "_LEASE_SECONDS", 6.0)
    first, ends = processes[0], []

    def blocking_init() -> None:
        async def ask() -> object:
            other = Database(database.settings, Path())
            try:
                return await lease_until(other)
            finally:
                await other.dispose()

        ends.append(asyncio.run(ask()))
        give_up_at = time.monotonic() + 30
        while time.monotonic() < give_up_at and len(set(ends)) < 3:
            time.sleep(0.1)  # blocks this loop, and leaves the interpreter to the one that renews
            ends.append(asyncio.run(ask()))

    @first.plugin.mount_init_method()
    async def block() -> None:
        with ThreadPoolExecutor(1) as thread:  # no loop can run inside this blocked one
            thread.submit(blocking_init).result()

    await first.start()
    assert len(set(ends)) >= 3, "the lease is not renewed while an init blocks the loop"
    for process in processes:
        await process.database.dispose()


async def test_an_init_that_loses_its_lease_is_cancelled_and_its_process_does_not_start(
    processes: list[Process], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialisation, "_LEASE_SECONDS", 2.0)
    first, ends = processes[0], []

    @first.plugin.mount_init_method()
    async def wait() -> None:
        async with database.begin() as tx:
            await tx.connection.execute(update(LeaseRow).values(fence=LeaseRow.fence + 1, owner="other"))
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 30)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    with pytest.raises(FencedError, match="init hooks"):
        await first.start()
    assert ends == ["cancelled"]
    for process in processes:
        await process.database.dispose()
