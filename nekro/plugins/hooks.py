"""Runs the plugins' hooks one after another; a failing hook stops neither the others nor the worker.

Tasks that plugin code starts on the event loop and leaves running are noted, and end with the plugin.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from nekro_agent import runtime
from nekro_agent.core.logger import get_sub_logger, log_failure
from nekro_agent.durations import POLL_SECONDS
from nekro_agent.errors import InvalidValueError
from nekro_agent.execution.current import payer_of, paying
from nekro_agent.execution.greenlets import run_callable
from nekro_agent.files import staging
from nekro_agent.plugin import NekroPlugin, using
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage, bring_files
from nekro_agent.schemas.signal import MsgSignal, merge_signals
from nekro_agent.services.timer.timer_service import drop_timers_of, run_callbacks_here

__all__ = [
    "HookFailure",
    "PluginHost",
    "RemoteHooks",
    "signal_of",
    "state_hooks",
    "watched_tasks",
]

_watched: ContextVar[list[asyncio.Task[Any]] | None] = ContextVar("nekro_watched_tasks", default=None)


class _NotingFactory:
    """The task factory of a loop while one or more blocks are watched; identifies tasks by their context."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._before = loop.get_task_factory()
        self._blocks = 0

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Future[Any]:
        before = self._before
        made = before(loop, work, **options) if before else asyncio.Task(work, loop=loop, **options)
        mine = _watched.get()
        # A factory of other code may lie between two of these, which then see the same task.
        if mine is not None and isinstance(made, asyncio.Task) and made not in mine[-1:]:
            mine.append(made)
        return made

    def begin(self) -> None:
        """Count a block."""
        self._blocks += 1

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count the end of a block; after the last one the loop has its former factory again.

        A factory that other code has set meanwhile stays, since it may call this one.
        """
        self._blocks -= 1
        if self._blocks == 0:
            if _factories.get(loop) is self:
                del _factories[loop]
            if loop.get_task_factory() is self:
                loop.set_task_factory(self._before)


#: Blocks overlap if several plugins are initialised at the same time, and any of them may end first.
_factories: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _NotingFactory]] = WeakKeyDictionary()


@asynccontextmanager
async def watched_tasks() -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Collect the tasks that the block starts, directly or through others.

    A context variable distinguishes them from tasks of other code that runs on the loop meanwhile.
    """
    loop = asyncio.get_running_loop()
    factory = _factory_of(loop)
    factory.begin()
    created: list[asyncio.Task[Any]] = []
    token = _watched.set(created)
    try:
        yield created
    finally:
        _watched.reset(token)
        factory.end(loop)
    if any(not task.done() for task in created):
        await asyncio.sleep(POLL_SECONDS)


def _factory_of(loop: asyncio.AbstractEventLoop) -> _NotingFactory:
    known = _factories.get(loop)
    is_set = loop.get_task_factory() is known
    if known is not None and is_set:
        return known
    made = _NotingFactory(loop)
    _factories[loop] = made
    loop.set_task_factory(made)
    return made


_log = get_sub_logger("hooks")


@dataclass(frozen=True, kw_only=True)
class HookFailure:
    """One hook that raised."""

    plugin_key: str
    hook: str
    error: str

    @property
    def text(self) -> str:
        """``init hook: ValueError: no key``."""
        return f"{self.hook} hook: {self.error}"


class RemoteHooks(Protocol):
    """Runs hooks of plugins that run in another process; implemented by the application."""

    async def is_elsewhere(self, plugin_key: str) -> bool:
        """Whether the plugin's hooks must run in another process."""
        ...

    async def run(self, plugin_key: str, hook: str, ctx: AgentCtx, *args: Any) -> Any:
        """Run a hook there and return its text or signal; None if there is no answer."""
        ...


class PluginHost:
    """The lifecycle and the hooks of the plugins of one process.

    A hook that raises is logged and reported as :class:`HookFailure`; the other plugins' hooks
    still run. Disabled plugins have init and cleanup only.
    """

    def __init__(
        self,
        plugins: Iterable[NekroPlugin],
        *,
        remote: RemoteHooks | None = None,
        hook_seconds: float = 60,
        init_seconds: float = 600,
        cleanup_seconds: float = 20,
    ) -> None:
        """Create the runner of hooks.

        Args:
            plugins: in loading order.
            remote: None if every plugin runs in this process. Init and cleanup always run here.
            hook_seconds: time limit of a hook of a message, prompt or reset.
            init_seconds: time limit of one init; long, because it may migrate data.
            cleanup_seconds: time limit of the cleanup hooks of all plugins that stop together.
        """
        self.plugins: Sequence[NekroPlugin] = list(plugins)
        self._remote = remote
        self._hook_seconds = hook_seconds
        self._init_seconds = init_seconds
        #: See the argument; public for callers that limit ``stop``.
        self.cleanup_seconds = cleanup_seconds
        self._started: list[NekroPlugin] = []
        self._tasks: dict[NekroPlugin, list[asyncio.Task[Any]]] = {}

    async def start(self, *, skip: Collection[str] = ()) -> list[HookFailure]:
        """Run every init hook, one after another; a plugin whose init failed keeps its methods.

        The caller ensures that only one process of the fleet runs this at a time, because an
        init may migrate data.

        Args:
            skip: keys of plugins that do not run in this process.
        """
        staging.sweep(runtime.data_root())
        run_callbacks_here()
        failures: list[HookFailure] = []
        for plugin in self.plugins:
            await _complete_config(plugin)
            if plugin.is_enabled and plugin.key not in skip:
                failures += await self.start_plugin(plugin)
        return failures

    async def start_plugin(self, plugin: NekroPlugin) -> list[HookFailure]:
        """Run one plugin's init hook; returns its failure in a list, or an empty list."""
        self._started.append(plugin)
        async with watched_tasks() as created:
            _, failure = await self._run(plugin, "init", seconds=self._init_seconds)
        plugin.adopt_commands()
        self._tasks[plugin] = [task for task in created if not task.done()]
        return [failure] if failure else []

    def has_started(self, plugin: NekroPlugin) -> bool:
        """Whether a plugin was started here and not stopped since."""
        return plugin in self._started

    async def stop_plugin(self, plugin: NekroPlugin) -> list[HookFailure]:
        """Run one plugin's cleanup hook and cancel its tasks; no effect if it was not started."""
        return await self.stop([plugin])

    async def stop(self, plugins: Collection[NekroPlugin] | None = None) -> list[HookFailure]:
        """Run the cleanup hooks of started plugins once, in reverse order.

        All of them share ``cleanup_seconds``: if one uses them up, those after it have no time left, which
        is a failure of each. The tasks that plugins left running are cancelled in any case.

        Args:
            plugins: None means all.
        """
        give_up_at = time.monotonic() + self.cleanup_seconds
        failures: list[HookFailure] = []
        for plugin in reversed(self._started.copy()):
            if plugins is not None and plugin not in plugins:
                continue
            self._started.remove(plugin)
            seconds = max(0.0, give_up_at - time.monotonic())
            _, failure = await self._run(plugin, "cleanup", seconds=seconds)
            failures += [failure] if failure else []
            self.cancel_tasks(plugin)
        return failures

    def cancel_tasks(self, plugin: NekroPlugin) -> None:
        """Cancel the tasks that a plugin's init and ``on_enabled`` hooks left running, and its timers."""
        drop_timers_of(plugin)
        for task in self._tasks.pop(plugin, ()):
            task.cancel()

    @property
    def left_tasks(self) -> dict[str, list[asyncio.Task[Any]]]:
        """Tasks that inits and ``on_enabled`` hooks left running, by plugin key."""
        return {plugin.key: tasks for plugin, tasks in self._tasks.items()}

    async def channel_reset(self, ctx: AgentCtx) -> list[HookFailure]:
        """Run the reset hooks for ``ctx``'s chat."""
        ran = [await self._show(p, "channel_reset", ctx) for p in self._enabled()]
        return [failure for _, failure in ran if failure]

    async def on_channel_reset(self, chat_key: str) -> None:
        """Run the reset hooks for a chat that a plugin resets."""
        await self.channel_reset(await AgentCtx.create_by_chat_key(chat_key))

    async def has_message_hooks(self) -> bool:
        """Whether an enabled plugin has the hook of messages."""
        return any(plugin.hook("user_message") is not None for plugin in self._enabled())

    async def user_message(self, ctx: AgentCtx, message: ChatMessage) -> MsgSignal:
        """Pass an incoming message to every plugin and return their merged answer."""
        await bring_files(message.content_data, chat_key=message.chat_key)
        ran = [await self._show(p, "user_message", ctx, message) for p in self._enabled()]
        return merge_signals(signal_of(answer) for answer, _ in ran)

    async def system_message(self, ctx: AgentCtx, text: str) -> MsgSignal:
        """Pass a system message to every plugin and return their merged answer."""
        ran = [await self._show(p, "system_message", ctx, text) for p in self._enabled()]
        return merge_signals(signal_of(answer) for answer, _ in ran)

    async def on_system_message(self, chat_key: str, text: str) -> bool:
        """Run the system message hooks; True if the message must be dropped (BLOCK_ALL)."""
        if not any(plugin.hook("system_message") for plugin in self._enabled()):
            return False
        ctx = await AgentCtx.create_by_chat_key(chat_key)
        return await self.system_message(ctx, text) is MsgSignal.BLOCK_ALL

    async def inject(self, plugin: NekroPlugin, ctx: AgentCtx) -> str:
        """Return what one plugin adds to a round's prompt; an exception of its hook propagates."""
        hook = plugin.hook("prompt_inject")
        if hook is None:
            return ""
        plugin.refresh_config()
        if self._remote is not None and await self._remote.is_elsewhere(plugin.key):
            return str(await self._remote.run(plugin.key, "prompt_inject", ctx) or "")
        own = ctx.for_plugin(plugin.key)
        async with staging.call_scope(f"{plugin.key}.prompt_inject", own.fs, plugin_key=plugin.key):
            return str(await run_callable(hook, own) or "")

    async def run_here(self, plugin: NekroPlugin, hook: str, ctx: AgentCtx, *args: Any) -> Any:
        """Run one plugin's hook for another process; None if it failed, which is logged."""
        answer, _ = await self._run(plugin, hook, ctx.for_plugin(plugin.key), *args)
        return answer

    async def set_enabled(self, plugin_key: str, enabled: bool) -> list[HookFailure]:
        """Enable or disable a plugin and run its callbacks; no effect if its state is unchanged.

        Raises:
            KeyError: no plugin has that key.
        """
        plugin = next((p for p in self.plugins if p.key == plugin_key), None)
        if plugin is None:
            raise KeyError(plugin_key)
        if plugin.is_enabled == enabled:
            return []
        plugin.set_enabled(enabled)
        return await self.run_state_hooks(plugin)

    async def run_state_hooks(self, plugin: NekroPlugin) -> list[HookFailure]:
        """Run a plugin's ``on_enabled`` hooks, or its ``on_disabled`` hooks if it is disabled.

        The tasks that ``on_enabled`` hooks leave running end with the plugin, like those of its init.
        """
        name = "on_enabled" if plugin.is_enabled else "on_disabled"
        async with watched_tasks() as created:
            ran = [
                await self._guard(plugin, name, callback, (), self._hook_seconds)
                for callback in state_hooks(plugin)
            ]
        if plugin.is_enabled and plugin in self._started:
            self._tasks.setdefault(plugin, []).extend(task for task in created if not task.done())
        return [failure for _, failure in ran if failure]

    def use(self, plugins: Iterable[NekroPlugin]) -> None:
        """Let these plugins have the events from now on; the caller starts new ones and stops old ones."""
        self.plugins = list(plugins)

    def _enabled(self) -> list[NekroPlugin]:
        return [plugin for plugin in self.plugins if plugin.is_enabled]

    async def _show(
        self, plugin: NekroPlugin, hook: str, ctx: AgentCtx, *args: Any
    ) -> tuple[Any, HookFailure | None]:
        """Run a hook for an event of a chat, in the plugin's process."""
        if plugin.hook(hook) is None:
            return None, None
        if self._remote is not None and await self._remote.is_elsewhere(plugin.key):
            return await self._remote.run(plugin.key, hook, ctx, *args), None
        return await self._run(plugin, hook, ctx.for_plugin(plugin.key), *args)

    async def _run(
        self, plugin: NekroPlugin, hook: str, *args: Any, seconds: float | None = None
    ) -> tuple[Any, HookFailure | None]:
        func = plugin.hook(hook)
        if func is None:
            return None, None
        return await self._guard(plugin, hook, func, args, self._hook_seconds if seconds is None else seconds)

    @staticmethod
    async def _guard(
        plugin: NekroPlugin, hook: str, func: Callable[..., Any], args: tuple[Any, ...], seconds: float
    ) -> tuple[Any, HookFailure | None]:
        plugin.refresh_config()
        try:
            files = next((argument.fs for argument in args if isinstance(argument, AgentCtx)), None)
            files_scope = staging.call_scope(f"{plugin.key}.{hook}", files, plugin_key=plugin.key)
            async with files_scope, asyncio.timeout(seconds):
                with using(plugin), paying(payer_of(plugin.key, *args)):
                    return await run_callable(func, *args), None
        except TimeoutError as exc:
            error = str(exc) or f"did not end within {seconds:g} s"
            _log.bind(plugin=plugin.key, hook=hook, error=error).error("plugin_hook_failed")
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # the task itself is cancelled, not the hook
            error = f"CancelledError: {exc}".rstrip(": ")
            _log.bind(plugin=plugin.key, hook=hook, error=error).error("plugin_hook_cancelled")
        except (Exception, SystemExit) as exc:  # plugin code; other plugins and the worker must continue
            error = f"{type(exc).__name__}: {exc}".rstrip(": ")
            log = _log.bind(plugin=plugin.key, hook=hook, error=error)
            log_failure(log, "plugin_hook_failed", exc, plugin_key=plugin.key)
        return None, HookFailure(plugin_key=plugin.key, hook=hook, error=error)


def state_hooks(plugin: NekroPlugin) -> list[Callable[[], Any]]:
    """Return the hooks that run when a plugin gets into its present state, enabled or disabled."""
    return plugin.enabled_callbacks if plugin.is_enabled else plugin.disabled_callbacks


async def _complete_config(plugin: NekroPlugin) -> None:
    """Add missing fields to the plugin's configuration file, so that its operator sees them."""
    if plugin.config_file is None:
        return
    try:
        await asyncio.to_thread(plugin.config_file.complete)
    except (OSError, InvalidValueError) as exc:  # the values read before stay in effect
        _log.bind(plugin=plugin.key, error=str(exc)).error("configuration_file_not_completed")


def signal_of(answer: Any) -> MsgSignal | None:
    """Convert a hook's answer to a signal; None if it is not one, which counts as CONTINUE."""
    try:
        return None if answer is None or isinstance(answer, bool) else MsgSignal(answer)
    except (ValueError, TypeError):
        log = _log.bind(answer=repr(answer), fix="return a MsgSignal or None")
        log.warning("message_hook_answer_invalid")
        return None
