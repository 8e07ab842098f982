"""Runs the plugins' init hooks: once per process, and in one process of the fleet at a time."""

from __future__ import annotations

from loguru import logger

from nekro_agent.execution.hooks import PluginHost
from workers.leases.init_lock import init_lock
from workers.leases.keeper import LeaseKeeper
from workers.plugins.lane_overrides import LaneOverrides
from workers.plugins.lanes import LaneChooser
from workers.plugins.loader import LoadedPlugins
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
) -> None:
    """Run every init hook; a plugin whose init fails is recorded as failed and keeps its methods.

    In the first worker of a fleet that starts, the ``on_enabled`` hooks run too.

    An init may migrate a plugin's data, so a lease admits one process at a time. Pinned plugins are
    left to their owners; a plugin whose init leaves tasks running is pinned here.

    Raises:
        StorageUnavailableError: the database does not answer or is not migrated.
        FencedError: another process may have run init hooks at the same time.
    """
    await states.read()
    has_inits = any(plugin.hook("init") for plugin in host.plugins if plugin.is_enabled)
    if not has_inits and not states.has_hooks():
        await host.start(skip=_pinned(host, lanes))
        return
    async with init_lock(leases, owner=owner):
        # Inside the lease, so that pins that an earlier process recorded apply here.
        await overrides.refresh()
        failures = await host.start(skip=_pinned(host, lanes))
        await _pin_what_left_tasks(host, overrides)
        failures += await states.serve()
    for failure in failures:
        loaded.add_error(failure.plugin_key, failure.text)


def _pinned(host: PluginHost, lanes: LaneChooser) -> set[str]:
    return {plugin.key for plugin in host.plugins if lanes.is_pinned(plugin.key)}


async def _pin_what_left_tasks(host: PluginHost, overrides: LaneOverrides) -> None:
    for plugin in host.plugins:
        count = sum(not task.done() for task in host.left_tasks.get(plugin.key, ()))
        if not count:
            continue
        reason = (
            f"left {count} tasks running after its init"
            if count > 1
            else "left a task running after its init"
        )
        if await overrides.pin_plugin(plugin.key, reason=reason):
            logger.bind(plugin=plugin.key, tasks=count).warning("plugin_pinned")
            await host.stop_plugin(plugin)
