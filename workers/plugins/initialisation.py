"""Runs the plugins' init hooks: once per process, and in one process of the fleet at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from loguru import logger

from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import FencedError
from nekro_agent.execution.hooks import PluginHost
from workers.leases.keeper import HeldLease, LeaseKeeper, on_this_loop
from workers.leases.kinds import INIT
from workers.plugins.lane_overrides import MethodMarks
from workers.plugins.lanes import LaneChooser
from workers.plugins.loader import LoadedPlugins

__all__ = ["start_plugins"]

_LEASE: Final = "plugins.init"
#: How long a worker that starts waits for one that died during its init hooks.
_LEASE_SECONDS: Final = 15.0


async def start_plugins(
    host: PluginHost,
    loaded: LoadedPlugins,
    leases: LeaseKeeper,
    *,
    owner: str,
    lanes: LaneChooser,
    marks: MethodMarks,
) -> None:
    """Run every init hook; a plugin whose init fails is recorded as failed and keeps its methods.

    An init may migrate a plugin's data, so a lease admits one process at a time. Pinned plugins are
    left to their owners; a plugin whose init leaves tasks running is pinned here.

    Raises:
        StorageUnavailableError: the database does not answer or is not migrated.
        FencedError: another process may have run init hooks at the same time.
    """
    if not any(plugin.hook("init") for plugin in host.plugins if plugin.is_enabled):
        await host.start(skip=_pinned(host, lanes))
        return
    async with _alone(leases, owner=owner):
        # Inside the lease, so that pins that an earlier process recorded apply here.
        await marks.refresh()
        failures = await host.start(skip=_pinned(host, lanes))
        await _pin_what_left_tasks(host, marks)
    for failure in failures:
        loaded.add_error(failure.plugin_key, f"{failure.hook} hook: {failure.error}")


def _pinned(host: PluginHost, lanes: LaneChooser) -> set[str]:
    return {plugin.key for plugin in host.plugins if lanes.is_pinned(plugin.key)}


async def _pin_what_left_tasks(host: PluginHost, marks: MethodMarks) -> None:
    for plugin in host.plugins:
        count = sum(not task.done() for task in host.left_tasks.get(plugin.key, ()))
        if not count:
            continue
        reason = (
            f"left {count} tasks running after its init"
            if count > 1
            else "left a task running after its init"
        )
        if await marks.pin_plugin(plugin.key, reason=reason):
            logger.bind(plugin=plugin.key, tasks=count).warning("plugin_pinned")
            await host.stop_plugin(plugin)


@asynccontextmanager
async def _alone(leases: LeaseKeeper, *, owner: str) -> AsyncIterator[None]:
    """Hold the lease for a block; losing it cancels the block and raises at the block's end."""
    task, is_inside = asyncio.current_task(), True

    def interrupt() -> None:
        if task is not None and is_inside:
            task.cancel()

    lease = await _acquire(leases, owner=owner, on_lost=on_this_loop(interrupt))
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


async def _acquire(leases: LeaseKeeper, *, owner: str, on_lost: Callable[[], None]) -> HeldLease:
    """Wait for the lease."""
    while True:
        lease = await leases.acquire(INIT, _LEASE, owner=owner, seconds=_LEASE_SECONDS, on_lost=on_lost)
        if lease is not None:
            return lease
        await asyncio.sleep(POLL_SECONDS)
