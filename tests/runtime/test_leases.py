"""The lease keeper: what it does when renewals fail, when another holder takes over, and at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cut_proxy import CutProxy
from database_outage import DatabaseOutage
from loguru import logger
from runtime_bench import RecordingPublisher
from sqlalchemy import update
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import AgentSettings, DatabaseSettings
from nekro.app import leases as keeper_module
from nekro.app.background import BackgroundLoop
from nekro.app.leases import PINNED, SWEEP, HeldLease, LeaseKeeper, LeaseKind
from nekro.plugins.hooks import HookFailure, PluginHost
from nekro.plugins.lanes import LaneChooser
from nekro_agent.errors import FencedError, StorageUnavailableError
from nekro_agent.methods import SandboxMethodType
from nekro_agent.plugin import NekroPlugin
from nekro_agent.shared_clock import elapsed_seconds
from storage.engine import Database
from storage.repositories.calls import CALL_CLAIMS, CallRequest
from storage.repositories.leases import LeaseRepository
from storage.states import CallState
from storage.tables import LEASES
from workers.ops.sweeper import Sweeper
from workers.plugins import pinned as pinned_module
from workers.plugins.initialisation import PluginStates
from workers.plugins.pinned import PinnedOwner

#: Duration of the leases, and how far the tests' clock advances until a renewal is due, or a lease is over.
LEASE_SECONDS = 60.0
UNTIL_DUE_SECONDS = LEASE_SECONDS / 3
#: A kind that is lost when its time is over, and one that is not.
STRICT, LENIENT = PINNED, SWEEP


class Clock:
    """The keeper's clock, which tests advance; real time passes as well."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def __call__(self) -> float:
        return elapsed_seconds() + self.ahead_seconds


class World(DatabaseOutage):
    """A keeper on a database that can be made unreachable, and a way past the outage."""

    def __init__(
        self, settings: DatabaseSettings, database: Database, proxy: CutProxy | None, clock: Clock, path: Path
    ) -> None:
        super().__init__(str(settings.url), proxy)
        # On SQLite the latter is how long a writer waits for the outage to end.
        limits = {"transaction_timeout_seconds": 30, "pool_timeout_seconds": 5 if proxy else 0.5}
        self.clock = clock
        self.past = database
        self.database = Database(settings.model_copy(update=limits), path)
        self.background = BackgroundLoop(self.database)
        self.keeper = LeaseKeeper(self.database, self.background)
        #: Names of log events.
        self.logged: list[str] = []
        self.losses: list[str] = []

    async def hold(
        self, kind: LeaseKind, name: str = "lease", *, limit_seconds: float | None = None
    ) -> HeldLease:
        """Acquire a lease; its loss is noted in ``losses``."""
        lease = await self.keeper.acquire(
            kind,
            name,
            owner="w1",
            seconds=LEASE_SECONDS,
            limit_seconds=limit_seconds,
            on_lost=lambda: self.losses.append(name),
        )
        assert lease is not None
        return lease

    async def taken_over(self, name: str = "lease") -> None:
        """Give a lease to another holder."""
        async with self.past.begin() as tx:
            await tx.connection.execute(
                update(LEASES)
                .where(LEASES.c.name == name)
                .values(fence=LEASES.c.fence + 1, owner="w2", lease_until=LEASES.c.lease_until)
            )

    async def failed(self) -> None:
        """Wait for a renewal that fails from now on."""
        self.logged.clear()
        await eventually(lambda: "leases_not_renewed" in self.logged, what="a failed renewal")

    async def renewed(self, lease: HeldLease) -> None:
        """Wait until a lease is renewed."""
        await eventually(lambda: is_renewed(lease), what="a renewal")


def is_renewed(lease: HeldLease) -> bool:
    return lease.seconds_left > LEASE_SECONDS - UNTIL_DUE_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keeper_module, "elapsed_seconds", clock)
    return clock


@pytest.fixture
async def world(
    kind_settings: DatabaseSettings, database: Database, clock: Clock, tmp_path: Path
) -> AsyncIterator[World]:
    settings, proxy = kind_settings, None
    if not database.is_sqlite:
        proxy = CutProxy(kind_settings)
        settings = await proxy.start()
    world = World(settings, database, proxy, clock, tmp_path)
    sink = logger.add(lambda line: world.logged.append(line.record["message"]))  # type: ignore[attr-defined]
    yield world
    logger.remove(sink)
    world.come_back()
    await asyncio.to_thread(world.background.close)
    await world.database.dispose()
    if proxy is not None:
        await proxy.stop()


kinds = pytest.mark.parametrize("kind", [STRICT, LENIENT], ids=["strict", "lenient"])


@kinds
async def test_an_outage_shorter_than_the_lease_is_survived(world: World, kind: LeaseKind) -> None:
    lease = await world.hold(kind)
    world.go_away()
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await world.failed()
    assert not lease.is_lost
    world.come_back()
    await world.renewed(lease)
    await lease.confirm()
    assert world.losses == []


async def test_a_strict_lease_is_lost_once_when_an_outage_is_longer(world: World) -> None:
    lease = await world.hold(STRICT)
    world.go_away()
    world.clock.ahead_seconds += LEASE_SECONDS
    assert lease.is_lost
    await eventually(lambda: bool(world.losses), what="the report of the loss")
    world.come_back()
    with pytest.raises(FencedError):
        await lease.confirm()
    with pytest.raises(FencedError):
        await lease.ensure()
    assert world.losses == ["lease"] and world.logged.count("lease_lost") == 1


async def test_a_lenient_lease_is_renewed_after_an_outage_that_is_longer(world: World) -> None:
    lease = await world.hold(LENIENT)
    world.go_away()
    world.clock.ahead_seconds += LEASE_SECONDS
    await world.failed()
    with pytest.raises(StorageUnavailableError):
        await lease.ensure()
    assert lease.seconds_left < 0 and not lease.is_lost
    world.come_back()
    await world.renewed(lease)
    await lease.ensure()
    assert world.losses == []


@kinds
async def test_a_lease_that_another_holder_acquired_is_lost_once(world: World, kind: LeaseKind) -> None:
    lease, other = await world.hold(kind), await world.hold(kind, "other")
    await world.taken_over()
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await eventually(lambda: bool(world.losses), what="the report of the loss")
    await world.renewed(other)
    with pytest.raises(FencedError):
        await lease.confirm()
    lease.lose()
    assert lease.is_lost and world.losses == ["lease"]


@pytest.mark.extended
async def test_a_sweep_after_an_outage_leaves_holders_the_time_to_renew(
    world: World, recorder: RecordingPublisher
) -> None:
    swept, lease_seconds = asyncio.Event(), 4.0

    async def sweep() -> None:
        swept.set()

    settings = AgentSettings(lease_seconds=lease_seconds)
    sweeper = Sweeper(world.database, world.keeper, recorder, settings, owner="w1", sweeps=(sweep,))
    call = CallRequest(id="call", method="a.b.c", type=SandboxMethodType.BEHAVIOR, chat_key="chat")
    async with world.past.begin() as tx:
        claim = await tx.calls.claim(call, worker="w2", lease_seconds=lease_seconds)
    sweeper.start()
    await swept.wait()
    world.go_away()
    await asyncio.sleep(1.2 * lease_seconds)  # its holder cannot renew it meanwhile
    swept.clear()
    world.come_back()
    with suppress(TimeoutError):  # the holder reaches the database later than the sweeper
        async with asyncio.timeout(0.3 * lease_seconds):
            await swept.wait()
    async with world.past.autocommit() as tx:
        renewal = await tx.leases.renew(CALL_CLAIMS, [(call.id, claim.fence)], lease_seconds=60)
    assert renewal.kept
    await swept.wait()
    async with world.past.read() as tx:
        assert (await tx.calls.get(call.id)).state is CallState.RUNNING
    await sweeper.close()


async def test_a_holder_that_asks_finds_the_loss_at_once(world: World) -> None:
    lease = await world.hold(LENIENT)
    await world.taken_over()
    await lease.ensure()  # its time is not over: no question
    with pytest.raises(FencedError):
        await lease.confirm()
    assert world.losses == ["lease"]


async def test_an_unexpected_error_of_a_renewal_is_logged_and_the_renewal_repeated(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew, failures = LeaseRepository.renew, [RuntimeError("unexpected"), ValueError("unexpected")]

    async def fail_first(self: LeaseRepository, *args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await renew(self, *args, **options)

    monkeypatch.setattr(LeaseRepository, "renew", fail_first)
    lease = await world.hold(STRICT)
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await world.renewed(lease)
    assert failures == [] and world.logged.count("leases_not_renewed") == 2
    assert world.losses == []


async def test_a_holder_that_fails_to_react_to_a_loss_does_not_stop_the_keeper(world: World) -> None:
    failing = world.keeper.hold(STRICT, "none", 1, seconds=LEASE_SECONDS, on_lost=lambda: 1 / 0)
    lease = await world.hold(STRICT)
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await world.renewed(lease)
    await eventually(lambda: "lease_loss_not_handled" in world.logged, what="the log record")
    assert failing.is_lost and world.losses == []


async def test_a_lease_is_renewed_while_the_loop_of_its_holder_is_blocked(world: World) -> None:
    lease = await world.hold(STRICT)
    if not world.database.is_sqlite:  # the proxy needs this loop, so another keeper goes past it
        await asyncio.to_thread(world.background.close)
        world.background = BackgroundLoop(world.past)
        leases = LeaseKeeper(world.past, world.background)
        lease = leases.hold(STRICT, lease.key, lease.fence, seconds=LEASE_SECONDS)
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    give_up_at = time.monotonic() + WAIT_SECONDS
    while not is_renewed(lease) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert is_renewed(lease)


async def test_a_second_release_has_no_effect(world: World) -> None:
    lease = await world.hold(LENIENT)
    await lease.release()
    again = await world.hold(LENIENT)
    await lease.release()
    lease.drop()
    await again.confirm()
    assert await world.keeper.acquire(LENIENT, "lease", owner="w2", seconds=LEASE_SECONDS) is None
    assert again.fence == lease.fence + 1


async def test_a_released_lease_is_neither_renewed_nor_reported_as_lost(world: World) -> None:
    lease, other = await world.hold(STRICT), await world.hold(STRICT, "other")
    await lease.release()
    await world.taken_over()
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await world.renewed(other)
    assert not is_renewed(lease) and world.losses == []
    assert "lease_lost" not in world.logged


@kinds
async def test_the_end_that_the_holder_records_is_not_reported_as_a_loss(
    world: World, kind: LeaseKind
) -> None:
    lease, other = await world.hold(kind), await world.hold(kind, "other")
    with lease.ending():
        world.clock.ahead_seconds += UNTIL_DUE_SECONDS
        await world.renewed(lease)
        await world.taken_over()  # as the row looks when its end is recorded
        world.clock.ahead_seconds += UNTIL_DUE_SECONDS
        await eventually(lambda: lease.is_lost, what="a renewal after the end")
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await world.renewed(other)
    assert world.losses == [] and "lease_lost" not in world.logged


@kinds
async def test_a_loss_is_reported_when_the_end_cannot_be_recorded(world: World, kind: LeaseKind) -> None:
    lease = await world.hold(kind)
    with pytest.raises(FencedError, match="the end is refused"), lease.ending():
        await world.taken_over()
        world.clock.ahead_seconds += UNTIL_DUE_SECONDS
        await eventually(lambda: lease.is_lost, what="a renewal after the loss")
        assert world.losses == []
        raise FencedError("the end is refused")
    assert world.losses == ["lease"] and world.logged.count("lease_lost") == 1


async def test_a_lease_that_cannot_be_released_runs_out_by_itself(world: World) -> None:
    lease = await world.hold(LENIENT)
    world.go_away()
    await lease.release()
    assert "lease_not_released" in world.logged


async def test_closing_during_a_renewal_ends_it_without_a_report(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewing = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def hang(self: LeaseRepository, *_: Any, **__: Any) -> Any:
        loop.call_soon_threadsafe(renewing.set)
        await asyncio.Event().wait()

    monkeypatch.setattr(LeaseRepository, "renew", hang)
    await world.hold(STRICT)
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    async with asyncio.timeout(WAIT_SECONDS):
        await renewing.wait()
    world.logged.clear()
    await asyncio.to_thread(world.background.close)
    assert world.losses == [] and world.logged == []


async def test_a_renewal_that_hangs_does_not_delay_the_loss(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(self: LeaseRepository, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(LeaseRepository, "renew", hang)
    await world.hold(STRICT)
    world.clock.ahead_seconds += LEASE_SECONDS
    await eventually(lambda: world.losses == ["lease"], what="the report of the loss")


async def test_a_lease_with_a_limit_is_renewed_while_its_holder_asks(world: World) -> None:
    silent = await world.hold(LENIENT, "silent", limit_seconds=UNTIL_DUE_SECONDS / 2)
    asking = await world.hold(LENIENT, "asking", limit_seconds=UNTIL_DUE_SECONDS / 2)
    world.clock.ahead_seconds += UNTIL_DUE_SECONDS
    await asking.ensure()
    await world.renewed(asking)
    assert not is_renewed(silent)


async def test_a_locked_row_delays_only_its_own_lease(world: World) -> None:
    if world.database.is_sqlite:
        pytest.skip("SQLite has no row locks")
    locked, free = await world.hold(STRICT, "locked"), await world.hold(STRICT, "free")
    async with world.past.begin() as tx:
        await tx.connection.execute(
            update(LEASES).where(LEASES.c.name == "locked").values(owner=LEASES.c.owner)
        )
        world.clock.ahead_seconds += UNTIL_DUE_SECONDS
        await world.renewed(free)
        assert not is_renewed(locked)
    await world.renewed(locked)
    assert world.losses == []


async def test_pinned_plugins_are_acquired_after_an_unexpected_error(
    database: Database, background: BackgroundLoop
) -> None:
    plugin, consumed, tries = NekroPlugin("m", "pinned", "", "1", "Ada"), list[str](), 0

    async def refresh() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("unexpected")

    async def run_start_hooks(_: NekroPlugin) -> list[HookFailure]:
        return []

    owner = PinnedOwner(
        leases=LeaseKeeper(database, background),
        host=PluginHost([plugin]),
        lanes=LaneChooser(pinned_plugins={plugin.key}),
        owner="w",
        lease_seconds=3,
        is_fallback=False,
        refresh=refresh,
        consume=consumed.append,
        run_start_hooks=run_start_hooks,
        on_failure=lambda _: None,
    )
    owner.start()
    await eventually(lambda: bool(consumed), what="the queue to be served")
    await owner.close()


async def test_a_pinned_plugin_is_started_again_after_an_outage_during_its_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_module, "_ATTEMPTS_PER_LEASE", LEASE_SECONDS / 0.1)
    plugin, consumed, ran = NekroPlugin("m", "pinned", "", "1", "Ada"), list[str](), list[str]()
    host, lanes = PluginHost([plugin]), LaneChooser(pinned_plugins={plugin.key})
    plugin.mount_init_method()(lambda: ran.append("init"))

    @plugin.on_enabled()
    async def begin_outage() -> None:
        ran.append("enabled")
        if ran.count("enabled") == 1:
            world.go_away()

    @plugin.mount_cleanup_method()
    async def end_outage() -> None:
        ran.append("cleanup")
        world.come_back()

    async def refresh() -> None:
        return None

    for is_enabled in (False, True):  # a decision, which the start confirms in the database
        async with world.past.autocommit() as tx:
            await tx.plugin_states.set(plugin.key, is_enabled=is_enabled)
    states = PluginStates(
        host,
        world.keeper,
        owner="w",
        disabled=(),
        may_run_here=lambda _: False,
        on_change=lambda: None,
        on_failure=lambda _: None,
    )
    owner = PinnedOwner(
        leases=world.keeper,
        host=host,
        lanes=lanes,
        owner="w",
        lease_seconds=LEASE_SECONDS,
        is_fallback=False,
        refresh=refresh,
        consume=consumed.append,
        run_start_hooks=states.run_start_hooks,
        on_failure=lambda _: None,
    )
    owner.start()
    await eventually(lambda: bool(consumed), what="the queue to be served")
    assert owner.holds(plugin.key) and ran == ["init", "enabled", "cleanup", "init", "enabled"]
    await owner.close()
    assert "pinned_plugin_not_started" in world.logged


async def test_a_pinned_plugin_that_cannot_be_started_leaves_the_others_served(
    database: Database, background: BackgroundLoop
) -> None:
    plugins = [NekroPlugin("m", name, "", "1", "Ada") for name in ("broken", "pinned")]
    consumed = list[str]()

    async def refresh() -> None:
        return None

    async def run_start_hooks(plugin: NekroPlugin) -> list[HookFailure]:
        if plugin is plugins[0]:
            raise RuntimeError("unexpected")
        return []

    owner = PinnedOwner(
        leases=LeaseKeeper(database, background),
        host=PluginHost(plugins),
        lanes=LaneChooser(pinned_plugins={plugin.key for plugin in plugins}),
        owner="w",
        lease_seconds=LEASE_SECONDS,
        is_fallback=False,
        refresh=refresh,
        consume=consumed.append,
        run_start_hooks=run_start_hooks,
        on_failure=lambda _: None,
    )
    owner.start()
    await eventually(lambda: consumed == ["pinned.Ada.pinned"], what="the other plugin to be served")
    async with database.read() as tx:
        held = await tx.leases.held(prefix="pinned:", limit=9)
    assert len(held) == 1, "the lease of the other one is free"
    await owner.close()


async def test_sweeps_continue_after_an_unexpected_error(
    database: Database,
    background: BackgroundLoop,
    recorder: RecordingPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swept, acquire, failures = asyncio.Event(), LeaseRepository.acquire, [RuntimeError("unexpected")]

    async def fail_first(self: LeaseRepository, *args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await acquire(self, *args, **options)

    async def sweep() -> None:
        swept.set()

    monkeypatch.setattr(LeaseRepository, "acquire", fail_first)
    sweeper = Sweeper(
        database,
        LeaseKeeper(database, background),
        recorder,
        AgentSettings(lease_seconds=1),
        owner="w",
        sweeps=(sweep,),
    )
    sweeper.start()
    async with asyncio.timeout(WAIT_SECONDS):
        await swept.wait()
    await sweeper.close()
