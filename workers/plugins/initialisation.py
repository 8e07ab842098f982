"""Runs the plugins' init hooks: once per process, and in one process of the fleet at a time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

from loguru import logger

from nekro.app.leases.init_lock import init_lock
from nekro.app.leases.keeper import LeaseKeeper
from nekro.base.tasks import end_tasks
from nekro.plugins.importing import Imported
from nekro.plugins.lanes import LaneChooser
from nekro.plugins.loader import LoadedPlugins
from nekro_agent.execution import callback_timers
from nekro_agent.execution.hooks import PluginHost
from nekro_agent.plugin import NekroPlugin
from workers.plugins.lane_overrides import LaneOverrides
from workers.plugins.states import PluginStates

__all__ = ["start_plugins"]


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
    count = max(count, callback_timers.count_of(plugin))
    if not count:
        return
    reason = (
        f"left {count} tasks running after its init" if count > 1 else "left a task running after its init"
    )
    if await overrides.pin_plugin(plugin.key, reason=reason):
        logger.bind(plugin=plugin.key, tasks=count).warning("plugin_pinned")
        await host.stop_plugin(plugin)
