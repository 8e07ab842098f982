"""Runs the plugins' init hooks: once per process, and in one process of the fleet at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Final

from loguru import logger

from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import FencedError
from nekro_agent.execution.hooks import PluginHost
from storage.engine import Database
from storage.repositories.leases import LeaseRepository
from workers.leases.keeping import report_loss, survived
from workers.plugins.lane_overrides import MethodMarks
from workers.plugins.lanes import LaneChooser
from workers.plugins.loader import LoadedPlugins
from workers.pools.background import BackgroundLoop

__all__ = ["start_plugins"]

_LEASE: Final = "plugins.init"
#: How long a worker that starts waits for one that died during its init hooks.
_LEASE_SECONDS: Final = 15.0
_LOOKS_PER_LEASE: Final = 4


async def start_plugins(
    host: PluginHost,
    loaded: LoadedPlugins,
    database: Database,
    background: BackgroundLoop,
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
    async with _alone(database, background, owner=owner):
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
async def _alone(database: Database, background: BackgroundLoop, *, owner: str) -> AsyncIterator[None]:
    """Hold the lease for a block; losing it cancels the block and raises at the block's end."""
    asked_at, fence = await _acquire(database, owner=owner)
    lease = _InitLease(database, fence=fence, held_until=asked_at + _LEASE_SECONDS)
    lease.keep(background)
    try:
        yield
    except asyncio.CancelledError:
        if not lease.is_lost:
            raise
    finally:
        lease.end()
        with survived("init_lease_not_released"):  # it expires by itself
            async with database.begin() as transaction:
                await LeaseRepository(transaction.connection).release(_LEASE, fence=fence)
    if lease.is_lost:
        raise FencedError(
            "the lease for running the plugins' init hooks was lost, so another process may run them too; "
            "restart this worker, and check whether the database was down or this host was suspended"
        )


async def _acquire(database: Database, *, owner: str) -> tuple[float, int]:
    """Wait for the lease; returns the ``time.monotonic`` time of the request, and the fencing token."""
    while True:
        asked_at = time.monotonic()
        async with database.begin() as transaction:
            fence = await LeaseRepository(transaction.connection).acquire(
                _LEASE, owner=owner, lease_seconds=_LEASE_SECONDS
            )
        if fence is not None:
            return asked_at, fence
        await asyncio.sleep(POLL_SECONDS)


class _InitLease:
    """Renews the lease on the background loop, because an init may block its own loop for minutes."""

    def __init__(self, database: Database, *, fence: int, held_until: float) -> None:
        self._database = database
        self._fence = fence
        #: By ``time.monotonic``, measured before the request: ends no later than the row's. 0: lost.
        self._held_until = held_until
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._keeper: Future[None] | None = None
        self._was_lost = False
        self._is_over = False

    @property
    def is_lost(self) -> bool:
        """Whether another process has the lease, or may have because no renewal was confirmed in time."""
        return self._was_lost or time.monotonic() >= self._held_until

    def keep(self, background: BackgroundLoop) -> None:
        """Start renewing; a loss cancels the task that created this object."""
        self._keeper = background.submit(self._keep())

    def end(self) -> None:
        """Stop renewing; from now on a loss cancels nothing."""
        self._is_over = True
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        while not self.is_lost:
            await asyncio.sleep(_LEASE_SECONDS / _LOOKS_PER_LEASE)
            with survived("init_lease_not_renewed"):
                await self._renew()
        self._was_lost = True
        report_loss("init", fence=self._fence)
        self._loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        if self._task is not None and not self._is_over:
            self._task.cancel()

    async def _renew(self) -> None:
        began = time.monotonic()
        async with self._database.autocommit() as transaction:
            is_kept = await transaction.leases.renew(_LEASE, fence=self._fence, lease_seconds=_LEASE_SECONDS)
        self._held_until = began + _LEASE_SECONDS if is_kept else 0.0
