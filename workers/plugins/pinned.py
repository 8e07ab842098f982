"""Pinned plugins: each runs in one process of the fleet, which owns it by lease and serves its queue.

Only the owner runs the plugin's init and ``on_enabled`` hooks. When the owner dies its lease expires, and
another process runs both and serves the queue; calls wait there meanwhile. A disabled plugin has an owner
too, which runs the hooks of decisions about it.

Processes of lane ``pinned`` compete for all pinned plugins. While the fleet has none, processes of lane
``methods`` compete, so a small system needs no additional process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from loguru import logger

from broker_config.topology import lane_queue
from nekro.app.leases import PINNED, HeldLease, LeaseKeeper
from nekro.base.tasks import end_tasks, log_errors
from nekro.plugins.hooks import HookFailure, PluginHost
from nekro.plugins.lanes import LaneChooser
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.methods import Lane
from nekro_agent.plugin import NekroPlugin

if TYPE_CHECKING:
    from workers.plugins.pinned_files import PinnedFiles

__all__ = ["PinnedOwner"]

_OWNER_LEASE: Final = "pinned:"
#: Of the process that has the database that plugins share, where hosts share no disk.
_DATABASE_LEASE: Final = "pinned-database"
#: Held by each process of lane ``pinned``; keeps processes of other lanes from competing.
_PRESENCE_LEASE: Final = "pinned-worker:"
#: Attempts per lease duration to acquire the plugins that have no owner.
_ATTEMPTS_PER_LEASE: Final = 4
_LOST_EXIT: Final = 70


class PinnedOwner:
    """Competes for pinned plugins while the process runs."""

    def __init__(
        self,
        *,
        leases: LeaseKeeper,
        host: PluginHost,
        lanes: LaneChooser,
        owner: str,
        lease_seconds: float,
        is_fallback: bool,
        refresh: Callable[[], Awaitable[None]],
        consume: Callable[[str], None],
        run_start_hooks: Callable[[NekroPlugin], Awaitable[list[HookFailure]]],
        on_failure: Callable[[HookFailure], None],
        files: PinnedFiles | None = None,
    ) -> None:
        """Create the competitor.

        Args:
            run_start_hooks: runs the ``on_enabled`` hooks of a plugin.
            refresh: updates ``lanes``.
            is_fallback: do not compete while a process of lane ``pinned`` exists.
            consume: starts serving a plugin's queue.
            on_failure: called with each init or ``on_enabled`` hook that failed.
            files: has the plugins' directories; None where hosts share a disk.
        """
        self._leases = leases
        self._host = host
        self._lanes = lanes
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._is_fallback = is_fallback
        self._refresh = refresh
        self._consume = consume
        self._run_start_hooks = run_start_hooks
        self._on_failure = on_failure
        self._files = files
        self._held: dict[str, HeldLease] = {}
        #: Keys of the plugins whose init and ``on_enabled`` have run here. Until then nothing else of this
        #: process may run hooks of them.
        self._adopted: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to compete, on the running loop."""
        self._task = asyncio.create_task(self._compete_forever(), name="nekro-pinned")

    def holds(self, plugin_key: str) -> bool:
        """Whether this process owns a plugin and has started it."""
        return plugin_key in self._adopted

    async def close(self) -> None:
        """Run the plugins' cleanups, then release the leases."""
        await end_tasks(self._task)
        await self._host.stop([plugin for plugin in self._host.plugins if self._has_lease(plugin)])
        for name, lease in self._held.items():
            if self._files is not None:
                await self._files.leave(name.removeprefix(_OWNER_LEASE))
            await lease.release()
        self._held.clear()

    @property
    def close_seconds(self) -> float:
        """Time limit of ``close``; leases that are not released by then expire."""
        return self._host.cleanup_seconds + CLOSE_STEP_SECONDS

    async def _compete_forever(self) -> None:
        if self._is_fallback:
            # Gives priority to processes of lane ``pinned`` that start at the same time.
            await asyncio.sleep(self._lease_seconds / 5)
        while True:
            with log_errors("pinned_plugins_not_claimed"):
                await self._compete()
            await asyncio.sleep(self._lease_seconds / _ATTEMPTS_PER_LEASE)

    async def _compete(self) -> None:
        await self._refresh()
        pinned = [
            plugin
            for plugin in self._host.plugins
            if self._lanes.is_pinned(plugin.key) and not self._has_lease(plugin)
        ]
        for plugin in pinned:
            # The plugin may have been started here before it was pinned; otherwise this is a no-op.
            await self._host.stop_plugin(plugin)
        if not await self._may_compete():
            return
        for plugin in pinned:
            with log_errors("pinned_plugin_not_started", plugin=plugin.key):  # the others must start
                if await self._has_database_for(plugin) and await self._acquire(
                    f"{_OWNER_LEASE}{plugin.key}"
                ):
                    await self._adopt(plugin)

    async def _has_database_for(self, plugin: NekroPlugin) -> bool:
        """Whether a plugin may be adopted: one that uses the plugins' database only where that is."""
        files = self._files
        if files is None or not files.uses_database(plugin.key) or _DATABASE_LEASE in self._held:
            return True
        if not await self._acquire(_DATABASE_LEASE):
            return False
        try:
            await files.take_database(_DATABASE_LEASE, self._held[_DATABASE_LEASE])
        except Exception:
            await self._held.pop(_DATABASE_LEASE).release()
            raise
        return True

    def _has_lease(self, plugin: NekroPlugin) -> bool:
        return f"{_OWNER_LEASE}{plugin.key}" in self._held

    async def _may_compete(self) -> bool:
        if self._is_fallback:
            async with self._leases.database.read() as transaction:
                return not await transaction.leases.held(prefix=_PRESENCE_LEASE, limit=1)
        name = f"{_PRESENCE_LEASE}{self._owner}"
        return name in self._held or await self._acquire(name)

    async def _acquire(self, name: str) -> bool:
        lease = await self._leases.acquire(
            PINNED,
            name,
            owner=self._owner,
            seconds=self._lease_seconds,
            on_lost=partial(self._give_up, name),
        )
        if lease is None:
            return False
        self._held[name] = lease
        return True

    async def _adopt(self, plugin: NekroPlugin) -> None:
        """Start a plugin whose lease was acquired; a failure releases the lease, and it is tried again."""
        try:
            if self._files is not None:
                await self._files.take(plugin.key, self._held[f"{_OWNER_LEASE}{plugin.key}"])
            await self._start(plugin)
        except Exception:
            self._adopted.discard(plugin.key)
            await self._host.stop_plugin(plugin)
            if self._files is not None:
                await self._files.leave(plugin.key)
            await self._held.pop(f"{_OWNER_LEASE}{plugin.key}").release()
            raise

    async def _start(self, plugin: NekroPlugin) -> None:
        """Run init and ``on_enabled`` here, then serve the plugin's calls, which thus find it initialised."""
        is_started = False
        while is_started != plugin.is_enabled:  # it may be enabled or disabled meanwhile
            if is_started:
                await self._host.stop_plugin(plugin)
            else:
                await self._initialise(plugin)
            is_started = not is_started
        self._adopted.add(plugin.key)
        self._consume(str(lane_queue(Lane.METHODS, plugin.key).name))
        logger.bind(plugin=plugin.key, owner=self._owner).info("pinned_plugin_owned")

    async def _initialise(self, plugin: NekroPlugin) -> None:
        for failure in [*await self._host.start_plugin(plugin), *await self._run_start_hooks(plugin)]:
            # It keeps its methods, like a plugin that is not pinned.
            logger.bind(plugin=plugin.key, error=failure.error).error("pinned_plugin_init_failed")
            self._on_failure(failure)

    def _give_up(self, name: str) -> None:
        """Exit the process: only this ends what init started, and another process may run it now."""
        logger.bind(name=name, owner=self._owner).critical("pinned_plugin_lost")
        os._exit(_LOST_EXIT)
