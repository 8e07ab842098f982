"""Init hooks run once per process, and in one process of the fleet at a time."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update
from waiting import eventually

from broker_config.settings import DatabaseSettings
from nekro.app.background import BackgroundLoop
from nekro.app.catalogue import LaneOverrides
from nekro.app.leases import LeaseKeeper
from nekro.plugins.hooks import PluginHost
from nekro.plugins.lanes import LaneChooser
from nekro.plugins.loader import LoadedPlugins
from nekro_agent.errors import FencedError, StorageUnavailableError
from nekro_agent.plugin import NekroPlugin
from storage.engine import Database
from storage.repositories.plugin_states import PluginStateRepository
from storage.tables import LEASES
from workers.plugins import initialisation
from workers.plugins.initialisation import PluginStates, start_plugins


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
        self._overrides = LaneOverrides(database, self._lanes, on_pinned=lambda _: None)
        self._leases = LeaseKeeper(database, background)
        self.states = PluginStates(
            self.host,
            self._leases,
            owner=self.owner,
            disabled=(),
            may_run_here=lambda _: True,
            on_change=lambda: None,
            on_failure=lambda failure: self.failures.append(failure.text),
        )

    async def start(self) -> None:
        await start_plugins(
            self.host,
            self.loaded,
            self._leases,
            owner=self.owner,
            lanes=self._lanes,
            overrides=self._overrides,
            states=self.states,
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
            raise RuntimeError("the service is unavailable")

        process.loaded.add_error = (  # type: ignore[method-assign]
            lambda key, error, process=process: process.failures.append(f"{key}: {error}")
        )
    for process in processes:
        await process.start()
        await process.database.dispose()
    assert tried == [process.owner for process in processes]
    expected = ["Ada.migrating: init hook: RuntimeError: the service is unavailable"]
    assert [process.failures for process in processes] == [expected] * 4


async def lease_until(database: Database) -> object:
    async with database.read() as tx:
        found = select(LEASES.c.lease_until).where(LEASES.c.name == initialisation._LEASE)
        return (await tx.connection.execute(found)).scalar_one()


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
            await tx.connection.execute(update(LEASES).values(fence=LEASES.c.fence + 1, owner="other"))
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


def mount_state_hooks(processes: list[Process], ran: list[str]) -> None:
    for process in processes:

        @process.plugin.on_enabled()
        async def enabled(owner: str = process.owner) -> None:
            ran.append(f"enabled on {owner}")

        @process.plugin.on_disabled()
        async def disabled(owner: str = process.owner) -> None:
            ran.append(f"disabled on {owner}")


async def decide(database: Database, *, is_enabled: bool) -> bool:
    async with database.autocommit() as transaction:
        return await transaction.plugin_states.set("Ada.migrating", is_enabled=is_enabled)


async def test_a_decision_is_applied_everywhere_and_its_hooks_run_once(
    processes: list[Process], database: Database
) -> None:
    ran: list[str] = []
    inits: list[str] = []
    mount_state_hooks(processes, ran)
    for process in processes:
        process.plugin.mount_init_method()(lambda owner=process.owner: inits.append(owner))
        process.plugin.mount_cleanup_method()(lambda owner=process.owner: inits.remove(owner))
    for process in processes:
        await process.start()
        process.states.start()
    assert not await decide(database, is_enabled=True)
    assert await decide(database, is_enabled=False) and not await decide(database, is_enabled=False)
    await eventually(lambda: not any(process.plugin.is_enabled for process in processes) and not inits)
    await eventually(lambda: len(ran) == 1)
    assert await decide(database, is_enabled=True)
    await eventually(lambda: all(process.plugin.is_enabled for process in processes) and len(ran) == 2)
    assert sorted(inits) == [process.owner for process in processes]
    assert [text.split()[0] for text in ran] == ["disabled", "enabled"]
    for process in processes:
        await process.states.close()
        await process.database.dispose()
    assert len(ran) == 2


async def test_a_disabled_plugin_is_cleaned_up_although_the_database_failed_after_its_hook(
    processes: list[Process], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced, failures = PluginStateRepository.announced, [StorageUnavailableError("no connection")]

    async def fail_first(self: PluginStateRepository, *args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        await announced(self, *args, **options)

    first, ran = processes[0], list[str]()
    mount_state_hooks([first], ran)
    first.plugin.mount_cleanup_method()(lambda: ran.append("cleanup"))
    await first.start()
    monkeypatch.setattr(PluginStateRepository, "announced", fail_first)
    first.states.start()
    await decide(database, is_enabled=False)
    await eventually(lambda: "cleanup" in ran, what="the cleanup hook")
    assert ran == ["disabled on worker-0", "disabled on worker-0", "cleanup"] and failures == []
    await first.states.close()
    for process in processes:
        await process.database.dispose()


async def test_a_plugin_whose_start_lost_the_lease_is_cleaned_up_before_it_starts_again(
    processes: list[Process], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initialisation, "_LEASE_SECONDS", 2.0)
    first, ran = processes[0], list[str]()
    await decide(database, is_enabled=False)
    first.plugin.mount_cleanup_method()(lambda: ran.append("cleanup"))

    @first.plugin.mount_init_method()
    async def wait() -> None:
        ran.append("init")
        if ran.count("init") > 1:
            return
        async with database.begin() as tx:
            await tx.connection.execute(
                update(LEASES)
                .where(LEASES.c.name == initialisation._LEASE)
                .values(fence=LEASES.c.fence + 1, owner="other")
            )
        await asyncio.Event().wait()  # until the loss cancels it

    await first.start()
    await decide(database, is_enabled=True)
    first.states.start()
    await eventually(lambda: first.plugin.is_enabled, what="the plugin to be enabled")
    assert ran == ["init", "cleanup", "init"]
    await first.states.close()
    for process in processes:
        await process.database.dispose()


async def test_a_worker_that_starts_later_knows_the_decision_and_runs_the_hooks_that_did_not_run(
    processes: list[Process], database: Database
) -> None:
    ran: list[str] = []
    mount_state_hooks(processes, ran)
    await decide(database, is_enabled=False)
    late = processes[0]
    await late.start()
    assert not late.plugin.is_enabled and ran == []
    late.states.start()
    await eventually(lambda: ran == ["disabled on worker-0"])
    await late.states.close()
    for process in processes:
        await process.database.dispose()


async def test_a_failing_hook_is_run_once_and_stops_nothing(
    processes: list[Process], database: Database
) -> None:
    ran: list[str] = []

    @processes[0].plugin.on_disabled()
    async def fail() -> None:
        ran.append("tried")
        raise RuntimeError("no")

    @processes[0].plugin.on_disabled()
    async def second() -> None:
        ran.append("second")

    await processes[0].start()
    processes[0].states.start()
    await decide(database, is_enabled=False)
    await eventually(lambda: ran == ["tried", "second"])
    await decide(database, is_enabled=True)
    await eventually(lambda: processes[0].plugin.is_enabled)
    assert ran == ["tried", "second"]
    await processes[0].states.close()
    for process in processes:
        await process.database.dispose()
