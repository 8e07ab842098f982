"""Hooks of pinned plugins: forwarded from the process of the event to the process of the plugin.

Only the owner of a pinned plugin has run its init, and the state that its hooks use (caches,
sessions, loops) exists only there. Prompts, messages and resets are therefore forwarded through the
plugin's queue, like calls of its methods. The wait is short: without an answer the hook is skipped,
with a warning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

from loguru import logger

from broker_config.settings import SandboxSettings
from broker_config.topology import HOOK_TASK
from codec.values import decode_arguments, decode_value, encode_arguments, encode_value
from codec.wire import Envelope, Invocation, Signer, new_id
from messaging.calls import MethodCaller
from nekro_agent.errors import CallTimeoutError, MethodNotFoundError, NekroError
from nekro_agent.execution.hooks import HOOK_SECONDS, PluginHost
from nekro_agent.methods import SandboxMethodType
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.shared_clock import shared_time
from workers.calls.executor import MisplacedCall
from workers.plugins.lanes import LaneChooser
from workers.pools.background import BackgroundLoop

__all__ = ["HookExecutor", "HookForwarder"]


class HookForwarder:
    """Implements ``nekro_agent.execution.hooks.RemoteHooks``; one instance per process."""

    def __init__(
        self,
        *,
        background: BackgroundLoop,
        make_caller: Callable[[], MethodCaller],
        lanes: LaneChooser,
        refresh: Callable[[], Awaitable[None]],
        lives_here: Callable[[str], bool],
        return_bytes: int,
        wait_seconds: float | None = None,
    ) -> None:
        """Create the forwarder.

        Args:
            make_caller: called when the first hook is forwarded, which most processes never do.
            refresh: updates ``lanes``.
            lives_here: whether this process owns the plugin of a key.
        """
        self._background = background
        self._make_caller = make_caller
        self._lanes = lanes
        self._refresh = refresh
        self._lives_here = lives_here
        self._return_bytes = return_bytes
        self._wait_seconds = HOOK_SECONDS / 2 if wait_seconds is None else wait_seconds
        self._caller: MethodCaller | None = None

    async def is_elsewhere(self, plugin_key: str) -> bool:
        """Whether a plugin's hooks must run in another process."""
        await self._refresh()
        return self._lanes.is_pinned(plugin_key) and not self._lives_here(plugin_key)

    async def run(self, plugin_key: str, hook: str, ctx: AgentCtx, *args: Any) -> Any:
        """Run a hook in its plugin's process; None, with a warning, when there is no answer in time."""
        invocation = self._invocation(plugin_key, hook, ctx, args)
        lane = self._lanes.lane_of_plugin(plugin_key)
        try:
            # On the background loop, because every loop of lane ``long`` may request hooks.
            envelope = await self._background.wait(self._call(invocation, lane))
            return decode_value(envelope.value or "", max_bytes=self._return_bytes)
        except NekroError as exc:
            logger.bind(plugin=plugin_key, hook=hook, error=str(exc)).warning("pinned_plugin_hook_left_out")
            return None

    async def close(self) -> None:
        """Stop listening for results."""
        if self._caller is not None:
            await self._background.wait(self._caller.close())
            self._caller = None

    async def _call(self, invocation: Invocation, lane: str) -> Envelope:
        if self._caller is None:
            self._caller = self._make_caller()
            await self._caller.start()
        return await self._caller.call(invocation, lane=lane)

    def _invocation(self, plugin_key: str, hook: str, ctx: AgentCtx, args: tuple[Any, ...]) -> Invocation:
        plain = [arg.model_dump(mode="json") if isinstance(arg, ChatMessage) else arg for arg in args]
        now = shared_time()
        return Invocation(
            call_id=new_id(),
            method=HOOK_TASK,
            chat_key=ctx.chat_key,
            container_key=ctx.container_key or "",
            user_id=ctx.from_user_id,
            adapter_key=ctx.adapter_key,
            channel_id=ctx.channel_id,
            channel_name=ctx.channel_name,
            channel_type=ctx.channel_type,
            wakes_agent=False,
            issued_at=now,
            deadline=now + timedelta(seconds=self._wait_seconds),
            args=encode_arguments((plugin_key, hook, plain), {}),
        )


class HookExecutor:
    """Runs forwarded hooks in the process that owns the plugin."""

    def __init__(
        self,
        *,
        host: PluginHost,
        signer: Signer,
        home_of: Callable[[str], str | None],
        sandbox_settings: SandboxSettings,
        worker_name: str,
    ) -> None:
        """Create the executor.

        Args:
            home_of: the queue of a plugin that another process owns; None if this process may run it.
        """
        self._host = host
        self._signer = signer
        self._home_of = home_of
        self._argument_bytes = sandbox_settings.argument_bytes
        self._return_bytes = sandbox_settings.return_bytes
        self._worker_name = worker_name

    async def execute(self, body: object) -> dict[str, Any]:
        """Run the hook that a message body names; returns the envelope as JSON data.

        Raises:
            MessageRefusedError: the body is unsigned, altered or malformed.
            CallTimeoutError: its deadline passed in the queue.
            MethodNotFoundError: this worker has not loaded the plugin.
            MisplacedCall: the plugin has moved to another process; nothing was done.
        """
        invocation = self._signer.verify(body, task_name=HOOK_TASK)
        if invocation.remaining_seconds() <= 0:
            raise CallTimeoutError(f"the deadline of hook {invocation.call_id} passed in the queue")
        arguments, _ = decode_arguments(invocation.args, max_bytes=self._argument_bytes)
        plugin_key, hook, args = arguments
        plugin = next((plugin for plugin in self._host.plugins if plugin.key == plugin_key), None)
        if plugin is None:
            raise MethodNotFoundError(f"this worker has no plugin {plugin_key!r}")
        home = self._home_of(plugin_key)
        if home is not None:
            raise MisplacedCall(home, body)
        if hook == "user_message":
            args = [ChatMessage.model_validate(args[0])]
        started_at = shared_time()
        answer = await self._host.run_here(plugin, hook, _context(invocation), *args)
        # Only texts and signals have a meaning; a hook may return any other value too.
        value = int(answer) if isinstance(answer, int) else None if answer is None else str(answer)
        return Envelope.of(
            call_id=invocation.call_id,
            type=SandboxMethodType.TOOL,
            value=encode_value(value, max_bytes=self._return_bytes),
            worker=self._worker_name,
            started_at=started_at,
            finished_at=shared_time(),
        ).model_dump(mode="json")


def _context(invocation: Invocation) -> AgentCtx:
    return AgentCtx.for_call(
        chat_key=invocation.chat_key,
        container_key=invocation.container_key or None,
        user_id=invocation.user_id,
        adapter_key=invocation.adapter_key,
        channel_id=invocation.channel_id,
        channel_name=invocation.channel_name,
        channel_type=invocation.channel_type,
    )
