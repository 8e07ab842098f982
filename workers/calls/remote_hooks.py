"""Hooks that run in another process: forwarded from the process of the event to that of the plugin.

Only the owner of a pinned plugin has run its init, and the state that its hooks use (caches,
sessions, loops) exists only there. Prompts, messages and resets are therefore forwarded through the
plugin's queue, like calls of its methods. The wait is short: without an answer the hook is skipped,
with a warning. Processes that import no plugin forward every hook (``nekro.app.calls.fleet_calls``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.app.calls.fleet_calls import CONFIG_HOOK, WITH_CHANGES, PluginTasks, run_on_worker
from nekro.app.chats.writer import context_of
from nekro.broker.calls import MethodCaller
from nekro.plugins.configuration import change_config, read_config
from nekro.plugins.hooks import PluginHost
from nekro.plugins.invoke import Outcome
from nekro.plugins.registry import LoadedRegistry
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments
from nekro_agent.durations import HOOK_SECONDS, RETRY_SECONDS
from nekro_agent.errors import MethodNotFoundError, NekroError
from nekro_agent.methods import Lane
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage, bring_files
from workers.calls.claims import TaskSubject
from workers.calls.handler import CallTarget, OnStep

__all__ = ["ForwardedHooks", "HookForwarder"]

#: How often a hook looks again for its plugin, each ``RETRY_SECONDS``: new MCP servers come within a second.
_LOOKS: Final = 6


class HookForwarder:
    """Implements ``nekro.plugins.hooks.RemoteHooks``; one instance per process."""

    def __init__(
        self,
        *,
        background: BackgroundLoop,
        make_caller: Callable[[], MethodCaller],
        tasks: PluginTasks,
        may_run_here: Callable[[str], bool],
        wait_seconds: float = HOOK_SECONDS / 2,
    ) -> None:
        """Create the forwarder.

        Args:
            make_caller: called when the first hook is forwarded, which most processes never do.
            may_run_here: whether this process may run the plugin of a key: its owner if it is pinned.
        """
        self._background = background
        self._make_caller = make_caller
        self._tasks = tasks
        self._may_run_here = may_run_here
        self._wait_seconds = wait_seconds
        self._caller: MethodCaller | None = None

    async def is_elsewhere(self, plugin_key: str) -> bool:
        """Whether a plugin's hooks must run in another process."""
        await self._tasks.refresh()
        return not self._may_run_here(plugin_key)

    async def run(self, plugin_key: str, hook: str, ctx: AgentCtx, *args: Any) -> Any:
        """Run a hook in its plugin's process; None, with a warning, when there is no answer in time."""
        try:
            # On the background loop, because every loop of lane ``long`` may request hooks.
            return await self._background.wait(self._run(plugin_key, hook, ctx, args))
        except NekroError as exc:
            logger.bind(plugin=plugin_key, hook=hook, error=str(exc)).warning("pinned_plugin_hook_left_out")
            return None

    async def close(self) -> None:
        """Stop listening for results."""
        if self._caller is not None:
            await self._background.wait(self._caller.close())
            self._caller = None

    async def _run(self, plugin_key: str, hook: str, ctx: AgentCtx, args: tuple[Any, ...]) -> object:
        if self._caller is None:
            self._caller = self._make_caller()
            await self._caller.start()
        return await run_on_worker(
            self._caller, self._tasks, plugin_key, hook, ctx, args, seconds=self._wait_seconds
        )


class ForwardedHooks(CallTarget):
    """Runs forwarded hooks in a process of the plugin."""

    subject = TaskSubject(name="hook", plugin_key="", lane=Lane.PINNED)
    is_claimed = False

    def __init__(
        self,
        host: PluginHost,
        registry: LoadedRegistry,
        *,
        home_of: Callable[[str], str | None],
        of_extensions: Mapping[str, Callable[[str], Awaitable[Any]]],
    ) -> None:
        """Create the target.

        Args:
            home_of: the queue of a plugin that another process owns; None if this process may run it.
            of_extensions: as ``WorkerPart.hooks``, of all extensions.
        """
        self._of_extensions = of_extensions
        self._host = host
        self._registry = registry
        self._home_of = home_of

    def home(self, arguments: Arguments) -> str | None:
        """See ``CallTarget``; the arguments name the plugin."""
        (plugin_key, _, _), _ = arguments
        return self._home_of(plugin_key)

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        """Run the hook; the value is its text or signal, or the full names of the methods that it selects."""
        (_, hook, args), _ = arguments
        ctx = context_of(invocation, user_id=invocation.user_id)
        plugin = await self._plugin(arguments)
        if hook == "collect_methods":
            own = await self._registry.available(ctx, plugin_key=plugin.key)
            return Outcome(type=self.subject.type, value=[entry.task for entry in own])
        if hook == CONFIG_HOOK:
            changes = args[0]
            config = await read_config(plugin) if changes is None else await change_config(plugin, changes)
            return Outcome(type=self.subject.type, value=config)
        if hook in self._of_extensions:
            value = await self._of_extensions[hook](plugin.key)
            return Outcome(type=self.subject.type, value=value)
        if hook == "user_message":
            return Outcome(type=self.subject.type, value=await self._read(plugin, ctx, *args))
        return Outcome(
            type=self.subject.type, value=_plain(await self._host.run_here(plugin, hook, ctx, *args))
        )

    async def _read(self, plugin: NekroPlugin, ctx: AgentCtx, said: dict[str, Any], *form: str) -> object:
        """Run the hook for a message; returns its signal, with what it changed if the caller asks for it."""
        message = ChatMessage.model_validate(said)
        await bring_files(message.content_data, chat_key=message.chat_key)
        before = message.changeable()
        signal = _plain(await self._host.run_here(plugin, "user_message", ctx, message))
        changes = message.changes_since(before) if WITH_CHANGES in form else {}
        return {"signal": signal, "changes": changes} if changes else signal

    async def _plugin(self, arguments: Arguments) -> NekroPlugin:
        """Return the plugin, which another process may have before this one: waits for it a few seconds.

        Raises:
            MethodNotFoundError: this worker does not get it.
        """
        (plugin_key, _, _), _ = arguments
        for look in range(1 + _LOOKS):
            if look:
                await asyncio.sleep(RETRY_SECONDS)
            for plugin in self._host.plugins:
                if plugin.key == plugin_key:
                    return plugin
        raise MethodNotFoundError(f"this worker has no plugin {plugin_key!r}")


def _plain(answer: object) -> int | str | None:
    """Return a hook's answer for its caller: only texts and signals have a meaning."""
    return int(answer) if isinstance(answer, int) else None if answer is None else str(answer)
