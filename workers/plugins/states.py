"""Which plugins are enabled: operators' decisions in SQL, applied by every worker while it runs.

Each worker applies a decision within ``FRESH_SECONDS``: methods, commands and message hooks appear or
disappear; a disabled plugin is cleaned up in each process, an enabled one initialised. The plugin's
``on_enabled`` and ``on_disabled`` hooks run once per decision in the fleet, in one worker, under the lease of
the init hooks. If that worker dies in a hook, another worker runs it again.

What ``on_enabled`` sets up (timers, loops, caches) is in the memory of the process that runs it. A plugin
with such a hook is therefore pinned: its owner runs the hook after each init, and so does the process that
takes the plugin over when the owner has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from loguru import logger

from nekro.app.leases.init_lock import init_lock
from nekro.app.leases.keeper import LeaseKeeper
from nekro.base.tasks import end_tasks, repeat
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.execution.hooks import HookFailure, PluginHost, state_hooks
from nekro_agent.plugin import NekroPlugin
from storage.repositories.lane_overrides import PluginState

__all__ = ["PluginStates"]


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
