"""The plugins' hooks and methods for a process that imports no plugin: they run on the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, cast

from loguru import logger

from nekro.app.calls.plugin_tasks import PluginTasks
from nekro.app.calls.run_on_worker import CONFIG_HOOK, MCP_HOOK, run_on_worker
from nekro.broker.calls import MethodCaller
from nekro.plugins.entries import MethodEntry, PluginEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.durations import GRACE_SECONDS, REFRESH_SECONDS
from nekro_agent.errors import MethodNotFoundError, NekroError
from nekro_agent.execution.hooks import HOOK_SECONDS, signal_of
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.schemas.signal import MsgSignal, merge_signals

__all__ = ["FleetHooks", "MessageHooks"]


_NO_CHAT: Final = "operator"


class MessageHooks(Protocol):
    """The hooks of messages and resets; ``PluginHost`` runs them here, ``FleetHooks`` on workers."""

    async def user_message(self, ctx: AgentCtx, message: ChatMessage) -> MsgSignal:
        """Pass an incoming message to every plugin and return their merged answer."""
        ...

    async def channel_reset(self, ctx: AgentCtx) -> object:
        """Run the reset hooks for the context's chat."""
        ...


class FleetHooks:
    """Runs hooks of the plugins of the catalogue on workers, one after another."""

    def __init__(self, registry: Registry, caller: MethodCaller, tasks: PluginTasks) -> None:
        self._registry = registry
        self._caller = caller
        self._tasks = tasks

    async def user_message(self, ctx: AgentCtx, message: ChatMessage) -> MsgSignal:
        """Pass an incoming message to every plugin that has the hook, and return their merged answer.

        Raises:
            NekroError: no worker answered for a plugin that is not pinned; it might have blocked the message.
        """
        answers = []
        for plugin in await self._plugins("user_message"):
            try:
                answers.append(await self._run(plugin.key, "user_message", ctx, message))
            except NekroError as exc:
                if not self._tasks.lanes.is_pinned(plugin.key):
                    raise
                # Like everywhere: the hook of a pinned plugin whose owner does not answer is left out.
                logger.bind(plugin=plugin.key, error=str(exc)).warning("pinned_plugin_hook_left_out")
        return merge_signals(signal_of(answer) for answer in answers)

    async def channel_reset(self, ctx: AgentCtx) -> None:
        """Run the reset hooks; one that no worker answers is logged."""
        for plugin in await self._plugins("channel_reset"):
            try:
                await self._run(plugin.key, "channel_reset", ctx)
            except NekroError as exc:
                logger.bind(plugin=plugin.key, error=str(exc)).warning("reset_hook_not_run")

    async def collected(
        self, plugin: PluginEntry, own: Sequence[MethodEntry], ctx: AgentCtx
    ) -> list[MethodEntry]:
        """Return the methods that a plugin's ``mount_collect_methods`` selects for a chat.

        Raises:
            NekroError: no worker answered.
        """
        chosen = await self._run(plugin.key, "collect_methods", ctx)
        return [entry for entry in own if isinstance(chosen, list) and entry.task in chosen]

    async def config(self, plugin_key: str, changes: Mapping[str, Any] | None) -> object:
        """Return ``{"schema", "values", "secrets"}`` of a plugin's configuration, after changes to it.

        Args:
            changes: None only reads.

        Raises:
            NekroError: the plugin has no configuration, a value does not fit, or no worker answered.
        """
        # No chat takes part; the context needs the name of one.
        ctx = AgentCtx.for_call(chat_key=_NO_CHAT, container_key="", user_id=None)
        return await self._run(plugin_key, CONFIG_HOOK, ctx, None if changes is None else dict(changes))

    async def try_mcp_server(self, plugin_key: str, *, seconds: float) -> dict[str, Any]:
        """Connect with the MCP server of a plugin on the worker that uses it; see
        ``nekro.extensions.mcp.follower``.

        A server that was declared just now is waited for, because workers have it within a second.

        Raises:
            NekroError: no worker has the plugin, or none answered.
        """
        ctx = AgentCtx.for_call(chat_key=_NO_CHAT, container_key="", user_id=None)
        give_up_at = time.monotonic() + GRACE_SECONDS
        while True:
            try:
                answer = await run_on_worker(
                    self._caller, self._tasks, plugin_key, MCP_HOOK, ctx, (), seconds=seconds
                )
                return dict(cast("Mapping[str, Any]", answer))
            except MethodNotFoundError:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(REFRESH_SECONDS)

    async def _plugins(self, hook: str) -> Iterable[PluginEntry]:
        await self._tasks.refresh()
        return [plugin for plugin in self._registry.plugins if plugin.enabled and hook in plugin.hooks]

    async def _run(self, plugin_key: str, hook: str, ctx: AgentCtx, *args: Any) -> object:
        return await run_on_worker(
            self._caller, self._tasks, plugin_key, hook, ctx, args, seconds=HOOK_SECONDS
        )
