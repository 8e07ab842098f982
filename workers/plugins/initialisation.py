"""Plugins are initialised, enabled and disabled: init hooks at the start, operators' decisions while a worker
runs.

Init hooks run once per process, and in one process of the fleet at a time, because they may change a plugin's
data. Decisions which plugins are enabled are rows. Each worker applies one within ``FRESH_SECONDS``: methods,
commands and message hooks appear or disappear; a disabled plugin is cleaned up in each process, an enabled
one initialised. The plugin's ``on_enabled`` and ``on_disabled`` hooks run once per decision in the fleet, in
one worker, under the lease of the init hooks. If that worker dies in a hook, another worker runs it again.

What ``on_enabled`` sets up (timers, loops, caches) is in the memory of the process that runs it. A plugin
with such a hook is therefore pinned: its owner runs the hook after each init, and so does the process that
takes the plugin over when the owner has gone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Final

from loguru import logger

from nekro.app.catalogue import LaneOverrides
from nekro.app.leases import INIT, HeldLease, LeaseKeeper, on_this_loop
from nekro.base.tasks import end_tasks, repeat
from nekro.plugins.hooks import HookFailure, PluginHost, state_hooks
from nekro.plugins.importing import Imported
from nekro.plugins.lanes import LaneChooser
from nekro.plugins.loader import LoadedPlugins
from nekro_agent.durations import FRESH_SECONDS, POLL_SECONDS
from nekro_agent.errors import FencedError
from nekro_agent.plugin import NekroPlugin
from nekro_agent.services.timer.timer_service import count_timers_of
from storage.repositories.plugin_states import PluginState

__all__ = [
    "PluginStates",
    "init_lock",
    "start_plugins",
]


_LEASE: Final = "plugins.init"
#: How long a worker that starts waits for one that died during its hooks.
_LEASE_SECONDS: Final = 15.0


@asynccontextmanager
async def init_lock(leases: LeaseKeeper, *, owner: str, plugin_key: str = "") -> AsyncIterator[None]:
    """Hold the lease for a block; losing it cancels the block and raises ``FencedError`` at its end.

    Args:
        plugin_key: of the only plugin whose hooks run; "" means all plugins.
    """
    task, is_inside = asyncio.current_task(), True

    def interrupt() -> None:
        if task is not None and is_inside:
            task.cancel()

    name = f"{_LEASE}:{plugin_key}" if plugin_key else _LEASE
    lease = await _acquire(leases, name, owner=owner, on_lost=on_this_loop(interrupt))
    try:
        yield
    except asyncio.CancelledError:
        if not lease.is_lost:
            raise
    finally:
        is_inside, was_lost = False, lease.is_lost
        await lease.release()
    if was_lost:
        raise FencedError(
            "the lease for running the plugins' init hooks was lost, so another process may run them too; "
            "restart this worker, and check whether the database was down or this host was suspended"
        )


async def _acquire(leases: LeaseKeeper, name: str, *, owner: str, on_lost: Callable[[], None]) -> HeldLease:
    """Wait for the lease."""
    while True:
        lease = await leases.acquire(INIT, name, owner=owner, seconds=_LEASE_SECONDS, on_lost=on_lost)
        if lease is not None:
            return lease
        await asyncio.sleep(POLL_SECONDS)


class PluginStates:
    """Applies decisions about plugins in one worker process."""

    def __init__(
        self,
        host: PluginHost,
        leases: LeaseKeeper,
        *,
        owner: str,
        disabled: Collection[str],
        may_run_here: Callable[[str], bool],
        on_change: Callable[[], None],
        on_failure: Callable[[HookFailure], None],
    ) -> None:
        """Create it; ``start`` follows decisions.

        Args:
            disabled: keys of plugins that the settings disable, whatever was decided.
            may_run_here: whether this process may run the plugin of a key: its owner if it is pinned.
            on_change: called after plugins were enabled or disabled.
            on_failure: called with each init that failed.
        """
        self._host, self._leases, self._owner = host, leases, owner
        self._disabled = frozenset(disabled)
        self._may_run_here, self._on_change, self._on_failure = may_run_here, on_change, on_failure
        self._task: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Enable and disable plugins as decided, before they are started; runs no hook.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        decisions = await self._decisions()
        for plugin in self._host.plugins:
            plugin.set_enabled(self._is_wanted(plugin, decisions))
        self._on_change()

    async def run_start_hooks(self, plugin: NekroPlugin) -> list[HookFailure]:
        """Run the ``on_enabled`` hooks of a plugin that its owner has started."""
        if not state_hooks(plugin):
            return []
        failures = await self._host.run_state_hooks(plugin)
        decision = (await self._decisions()).get(plugin.key)
        if decision is not None:
            await self._announced(decision)
        return failures

    def start(self) -> None:
        """Follow decisions from now on, on the running loop."""
        self._task = asyncio.create_task(
            repeat(self._follow, seconds=FRESH_SECONDS, on_error="plugin_states_not_applied"),
            name="nekro-plugin-states",
        )

    async def close(self) -> None:
        """Stop following."""
        await end_tasks(self._task)

    async def _follow(self) -> None:
        await self._apply(await self._decisions())

    async def _decisions(self) -> dict[str, PluginState]:
        async with self._leases.database.read() as transaction:
            return {state.plugin_key: state for state in await transaction.plugin_states.all()}

    async def wants(self, plugin: NekroPlugin) -> bool:
        """Whether a plugin is to be enabled.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        return self._is_wanted(plugin, await self._decisions())

    def _is_wanted(self, plugin: NekroPlugin, decisions: dict[str, PluginState]) -> bool:
        state = decisions.get(plugin.key)
        return plugin.key not in self._disabled and (state is None or state.is_enabled)

    async def _apply(self, decisions: dict[str, PluginState]) -> None:
        for plugin in list(self._host.plugins):
            wanted, state = self._is_wanted(plugin, decisions), decisions.get(plugin.key)
            if wanted and not plugin.is_enabled:
                await self._enable(plugin)
            if plugin.is_enabled and not wanted:
                self._set_enabled(plugin, False)
            if state is not None and state.announced_revision < state.revision and state.is_enabled == wanted:
                await self._run_decision_hooks(plugin, state)
            if not wanted and self._may_run_here(plugin.key):
                # After the hook, which may use what init made; no effect on a plugin that was stopped.
                await self._host.stop_plugin(plugin)

    async def _enable(self, plugin: NekroPlugin) -> None:
        """Initialise a plugin, then offer its methods; one whose init fails keeps them, as at the start."""
        if self._may_run_here(plugin.key):
            async with init_lock(self._leases, owner=self._owner):
                await self._host.stop_plugin(plugin)  # an attempt before may have lost the lease
                for failure in await self._host.start_plugin(plugin):
                    self._on_failure(failure)
        self._set_enabled(plugin, True)

    def _set_enabled(self, plugin: NekroPlugin, is_enabled: bool) -> None:
        plugin.set_enabled(is_enabled)
        self._on_change()
        logger.bind(plugin=plugin.key, enabled=is_enabled).info("plugin_state_changed")

    async def _run_decision_hooks(self, plugin: NekroPlugin, state: PluginState) -> None:
        """Run the hooks of a decision, unless another worker did."""
        if not state_hooks(plugin):
            await self._announced(state)
        elif self._may_run_here(plugin.key):
            async with init_lock(self._leases, owner=self._owner):
                newest = (await self._decisions()).get(plugin.key)
                if newest is None or newest.announced_revision >= state.revision:
                    return
                await self._host.run_state_hooks(plugin)
                await self._announced(state)

    async def _announced(self, state: PluginState) -> None:
        async with self._leases.database.autocommit() as transaction:
            await transaction.plugin_states.announced(state.plugin_key, revision=state.revision)


async def start_plugins(
    host: PluginHost,
    loaded: LoadedPlugins,
    leases: LeaseKeeper,
    *,
    owner: str,
    lanes: LaneChooser,
    overrides: LaneOverrides,
    states: PluginStates,
    patience_seconds: float = 30.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run every init hook; a plugin whose init fails is recorded as failed and keeps its methods.

    An init may migrate a plugin's data, so leases admit one process at a time: one for all plugins, and one
    for each, which an init keeps that takes long. Its plugin is taken out until the init has ended, and the
    other plugins go on. Pinned plugins, among them those with ``on_enabled`` hooks, are left to their
    owners; a plugin whose init leaves tasks running is pinned here.

    Args:
        patience_seconds: how long to wait for the init of one plugin.
        on_progress: called with what is done next.

    Raises:
        StorageUnavailableError: the database does not answer or is not migrated.
        FencedError: another process may have run init hooks at the same time.
    """
    await states.read()
    if not any(plugin.hook("init") for plugin in host.plugins if plugin.is_enabled):
        await host.start(skip=_pinned(host, lanes))
        return
    on_progress("waiting for the init hooks of another worker")
    async with init_lock(leases, owner=owner):
        # Inside the lease, so that pins that an earlier process recorded apply here.
        await overrides.refresh()
        skip = _pinned(host, lanes)
        with_init = {p.key for p in host.plugins if p.is_enabled and p.hook("init")} - skip
        await host.start(skip=skip | with_init)
        for plugin in [plugin for plugin in host.plugins if plugin.key in with_init]:
            on_progress(f"initialising {plugin.key}")
            task = asyncio.create_task(_initialise(plugin, host, loaded, leases, overrides, owner=owner))
            try:
                await asyncio.wait([task], timeout=patience_seconds)
            except asyncio.CancelledError:
                await end_tasks(task)
                raise
            if task.done():
                task.result()
            else:
                _leave_out(plugin, host, loaded, task, patience_seconds)


async def _initialise(
    plugin: NekroPlugin,
    host: PluginHost,
    loaded: LoadedPlugins,
    leases: LeaseKeeper,
    overrides: LaneOverrides,
    *,
    owner: str,
) -> None:
    async with init_lock(leases, owner=owner, plugin_key=plugin.key):
        for failure in await host.start_plugin(plugin):
            loaded.add_error(failure.plugin_key, failure.text)
        await _pin_if_tasks_are_left(plugin, host, overrides)


def _leave_out(
    plugin: NekroPlugin, host: PluginHost, loaded: LoadedPlugins, task: asyncio.Task[None], seconds: float
) -> None:
    """List a plugin as starting, with its module as the result of what goes on."""
    imported = next(found for found in loaded.found if found.plugin is plugin)
    later: Future[Imported] = Future()
    error = (
        f"its init takes longer than {seconds:g} s (NEKRO_PLUGINS__START_SECONDS); it is offered as soon as"
        " the init has ended"
    )
    loaded.replace(imported, dataclasses.replace(imported, plugin=None, error=error, later=later))
    host.use(loaded.plugins)
    logger.bind(plugin=plugin.key, seconds=seconds).warning("plugin_init_slow")

    def ended(task: asyncio.Task[None]) -> None:
        if later.cancelled() or task.cancelled():
            later.cancel()
        elif (exc := task.exception()) is not None:
            failed = f"its init was interrupted: {exc}"
            later.set_result(dataclasses.replace(imported, plugin=None, error=failed))
        else:
            later.set_result(imported)

    task.add_done_callback(ended)
    later.add_done_callback(lambda done: task.cancel() if done.cancelled() else None)


def _pinned(host: PluginHost, lanes: LaneChooser) -> set[str]:
    return {plugin.key for plugin in host.plugins if lanes.is_pinned(plugin.key)}


async def _pin_if_tasks_are_left(plugin: NekroPlugin, host: PluginHost, overrides: LaneOverrides) -> None:
    count = sum(not task.done() for task in host.left_tasks.get(plugin.key, ()))
    count = max(count, count_timers_of(plugin))
    if not count:
        return
    reason = (
        f"left {count} tasks running after its init" if count > 1 else "left a task running after its init"
    )
    if await overrides.pin_plugin(plugin.key, reason=reason):
        logger.bind(plugin=plugin.key, tasks=count).warning("plugin_pinned")
        await host.stop_plugin(plugin)
