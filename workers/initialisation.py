"""Running the plugins' init hooks: once per process, one process of the fleet at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from loguru import logger

from nekro_agent.errors import StorageUnavailableError
from nekro_agent.hooks import PluginHost
from storage.engine import Database
from storage.leases import LeaseRepository
from workers.lanes import LaneChooser
from workers.loader import LoadedPlugins
from workers.marks import MethodMarks

__all__ = ["start_plugins"]

_LEASE: Final = "plugins.init"
_LEASE_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.05


async def start_plugins(
    host: PluginHost,
    loaded: LoadedPlugins,
    database: Database,
    *,
    owner: str,
    lanes: LaneChooser,
    marks: MethodMarks,
) -> None:
    """Run every init hook; a plugin whose init fails is recorded as failed and keeps its methods.

    An init may migrate a plugin's data, so no two processes are inside this at once. Pinned plugins
    are left to their owner; one that turns out to leave tasks running is pinned here and now.

    Raises:
        StorageUnavailableError: the database does not answer or is not migrated.
    """
    if not any(plugin.hook("init") for plugin in host.plugins if plugin.is_enabled):
        await host.start(skip=_pinned(host, lanes))
        return
    async with _alone(database, owner=owner):
        # Inside: what an earlier process saw of a plugin counts for this one.
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
async def _alone(database: Database, *, owner: str) -> AsyncIterator[None]:
    fence = await _acquire(database, owner=owner)
    keeper = asyncio.create_task(_keep(database, fence))
    try:
        yield
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        async with database.begin() as transaction:
            await LeaseRepository(transaction.connection).release(_LEASE, fence=fence)


async def _acquire(database: Database, *, owner: str) -> int:
    while True:
        async with database.begin() as transaction:
            fence = await LeaseRepository(transaction.connection).acquire(
                _LEASE, owner=owner, lease_seconds=_LEASE_SECONDS
            )
        if fence is not None:
            return fence
        await asyncio.sleep(_POLL_SECONDS)


async def _keep(database: Database, fence: int) -> None:
    while True:
        await asyncio.sleep(_LEASE_SECONDS / 3)
        try:
            async with database.begin() as transaction:
                await LeaseRepository(transaction.connection).renew(
                    _LEASE, fence=fence, lease_seconds=_LEASE_SECONDS
                )
        except StorageUnavailableError as exc:
            logger.bind(error=str(exc)).warning("init_lease_not_renewed")
