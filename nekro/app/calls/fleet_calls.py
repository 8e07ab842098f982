"""What processes without the plugin run on workers: hooks, command lines, and reads of configurations.

A plugin command is a line that is sent to a worker, which holds the plugins' state, and whose responses
return. It may ask a question (``CmdCtl.wait``). The question is stored per chat and user, so the answer may
arrive in another process; each question accepts one answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from loguru import logger
from pydantic import BaseModel, Field

from broker_config.topology import COMMAND_TASK, HOOK_TASK
from nekro.app.calls.dispatch import CallScope
from nekro.app.catalogue import command_names, is_command
from nekro.app.chats.writer import chat_of
from nekro.broker.calls import MethodCaller
from nekro.plugins.entries import CommandEntry, MethodEntry, PluginEntry
from nekro.plugins.entry_registry import Registry
from nekro.plugins.hooks import PluginHost, signal_of
from nekro.plugins.lanes import LaneChooser
from nekro.wire.invocation import new_id
from nekro.wire.values import decode_value, encode_arguments
from nekro_agent.commands.registration import CmdCtl
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.durations import HOOK_SECONDS, PROGRAM_SECONDS, REFRESH_SECONDS
from nekro_agent.errors import (
    BrokerUnavailableError,
    InvalidValueError,
    MethodNotFoundError,
    NekroError,
    OverloadedError,
    ResultError,
    StorageUnavailableError,
)
from nekro_agent.execution.current import current_account
from nekro_agent.ports import ChatInfo, KeyValueStore
from nekro_agent.schemas.agent_ctx import AgentCtx
from nekro_agent.schemas.chat_message import ChatMessage
from nekro_agent.schemas.signal import MsgSignal, merge_signals
from nekro_agent.shared_clock import shared_time

__all__ = [
    "COMMAND_OWNER",
    "CONFIG_HOOK",
    "WITH_CHANGES",
    "CommandSender",
    "FleetHooks",
    "MessageHooks",
    "PluginTasks",
    "run_on_worker",
]


class PluginTasks:
    """Runs tasks of plugins that are not methods, and returns their plain values."""

    def __init__(
        self, lanes: LaneChooser, *, refresh_lanes: Callable[[], Awaitable[None]], return_bytes: int
    ) -> None:
        """Create it.

        Args:
            refresh_lanes: updates ``lanes``; see ``refresh``.
        """
        self.lanes = lanes
        #: Updates ``lanes``; await it before a question about them.
        self.refresh = refresh_lanes
        self._return_bytes = return_bytes

    async def run(
        self,
        caller: MethodCaller,
        task: str,
        arguments: tuple[Any, ...],
        *,
        plugin_key: str,
        chat: ChatInfo,
        user_id: str | None,
        timeout_seconds: float,
        lane: str | None = None,
        call_id: str | None = None,
    ) -> object:
        """Run a task in the process that may run the plugin, and return its value.

        Args:
            lane: None means the lane of the plugin's commands and hooks.
            call_id: None makes a new one.

        Raises:
            ArgumentError: an argument or the value is not plain data.
            The errors of ``MethodCaller.call``.
        """
        scope = CallScope(chat=chat, user_id=user_id, wakes_agent=False, account_id=current_account())
        invocation = scope.call(
            task,
            encode_arguments(arguments, {}),
            call_id=call_id or new_id(),
            deadline=shared_time() + timedelta(seconds=timeout_seconds),
        )
        envelope = await caller.call(invocation, lane=lane or self.lanes.lane_of_plugin(plugin_key))
        return decode_value(envelope.value or "", max_bytes=self._return_bytes)


#: Not a hook of plugins: reads the configuration or changes it. Its argument is None or the new values.
CONFIG_HOOK: Final = "nekro_config"
#: Follows the message of a hook if the caller understands ``{"signal", "changes"}`` as the answer.
WITH_CHANGES: Final = "with_changes"


async def run_on_worker(
    caller: MethodCaller,
    tasks: PluginTasks,
    plugin_key: str,
    hook: str,
    ctx: AgentCtx,
    args: tuple[Any, ...],
    *,
    seconds: float,
) -> object:
    """Run a hook in a process that may run the plugin; returns its text, signal or methods.

    What it changes in a message is changed in the given one too.

    Raises:
        The errors of ``PluginTasks.run``.
    """
    plain: list[Any] = [arg.model_dump(mode="json") if isinstance(arg, ChatMessage) else arg for arg in args]
    message = next((arg for arg in args if isinstance(arg, ChatMessage)), None)
    if message is not None:
        plain.append(WITH_CHANGES)
    answer = await tasks.run(
        caller,
        HOOK_TASK,
        (plugin_key, hook, plain),
        plugin_key=plugin_key,
        chat=chat_of(ctx),
        user_id=ctx.from_user_id,
        timeout_seconds=seconds,
    )
    if message is not None and isinstance(answer, Mapping):
        message.change(answer["changes"])
        return answer["signal"]
    return answer


_NO_CHAT: Final = "operator"


class FleetHooks:
    """Runs hooks of the plugins of the catalogue on workers, one after another."""

    def __init__(self, registry: Registry, caller: MethodCaller, tasks: PluginTasks) -> None:
        self._registry = registry
        self._caller = caller
        self._tasks = tasks

    async def has_message_hooks(self) -> bool:
        """Whether a plugin of the catalogue has the hook of messages."""
        return bool(await self._plugins("user_message"))

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
                # As everywhere, the hook of a pinned plugin is left out if the owner does not answer.
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

    async def ask_extension(self, plugin_key: str, hook: str, *, seconds: float) -> Any:
        """Call what an extension offers on the worker of a plugin (``WorkerPart.hooks``).

        A plugin that was added just now is waited for: workers have it within a second, on a busy host later.

        Raises:
            NekroError: no worker has the plugin, or none answered.
        """
        ctx = AgentCtx.for_call(chat_key=_NO_CHAT, container_key="", user_id=None)
        give_up_at = time.monotonic() + PROGRAM_SECONDS
        while True:
            try:
                return await run_on_worker(
                    self._caller, self._tasks, plugin_key, hook, ctx, (), seconds=seconds
                )
            except MethodNotFoundError:
                if time.monotonic() > give_up_at:
                    raise
                await asyncio.sleep(REFRESH_SECONDS)

    async def _plugins(self, hook: str) -> list[PluginEntry]:
        await self._tasks.refresh()
        return [plugin for plugin in self._registry.plugins if plugin.enabled and hook in plugin.hooks]

    async def _run(self, plugin_key: str, hook: str, ctx: AgentCtx, *args: Any) -> object:
        return await run_on_worker(
            self._caller, self._tasks, plugin_key, hook, ctx, args, seconds=HOOK_SECONDS
        )


#: Owner of open questions in the store; cannot collide with plugin keys, which contain a dot.
COMMAND_OWNER: Final = "nekro"

_STORE_KEY: Final = "open_question"


class _Question(BaseModel):
    """The question of a command that waits for an answer."""

    command: str
    text: str
    context_data: dict[str, Any] = Field(default_factory=dict)
    #: None: no time limit.
    until: datetime | None = None
    on_timeout_message: str = ""


#: The hooks of messages and resets, run on workers or in this process.
MessageHooks: TypeAlias = FleetHooks | PluginHost


class CommandSender:
    """Receives command lines and answers, and sends them to a worker."""

    def __init__(
        self, *, registry: Registry, caller: MethodCaller, tasks: PluginTasks, store: KeyValueStore
    ) -> None:
        self._registry = registry
        self._caller = caller
        self._tasks = tasks
        self._store = store

    async def run(
        self,
        line: str,
        *,
        chat: ChatInfo,
        who: CommandExecutionContext,
        timeout_seconds: float,
        call_id: str | None = None,
    ) -> list[CommandResponse]:
        """Run ``/name arguments``, or answer the open question of a command.

        A line that begins with ``/`` is a command and discards an open question; any other line is
        the answer to one. User errors are returned as responses; the last response is final.

        Args:
            call_id: a command runs once under its id, and later calls return its responses; None makes one.

        Raises:
            InvalidValueError: no question is open.
            CallTimeoutError, BrokerUnavailableError, OutcomeUnknownError: as for calls of methods.
        """
        who = who.model_copy(update={"adapter_key": who.adapter_key or chat.adapter_key or ""})
        question = await self._take_question(chat.chat_key, who.user_id)
        if not is_command(line):
            if question is None:
                raise InvalidValueError(
                    f"no command waits for an answer in chat {chat.chat_key}; to run a command, begin the "
                    f"line with a slash: {'/' + line.strip()!r}"
                )
            if question.until is not None and question.until < shared_time():
                text = question.on_timeout_message or f'the time to answer "{question.text}" is over'
                return [CmdCtl.failed(text)]
            line = f"/{question.command} {line}"
            who = who.model_copy(update={"context_data": question.context_data})
        try:
            responses = await self._send(line, chat, who, timeout_seconds, call_id)
        except (BrokerUnavailableError, OverloadedError, StorageUnavailableError):  # it does not run
            if question is not None:
                await self._keep(question, chat.chat_key, who.user_id)
            raise
        await self._keep_question(responses[-1], line, chat.chat_key, who.user_id)
        return responses

    async def _send(
        self,
        line: str,
        chat: ChatInfo,
        who: CommandExecutionContext,
        timeout_seconds: float,
        call_id: str | None,
    ) -> list[CommandResponse]:
        await self._tasks.refresh()
        try:
            plugin_key = self._find(line).plugin_key
        except InvalidValueError as exc:
            return [CmdCtl.failed(str(exc))]
        responses = await self._tasks.run(
            self._caller,
            COMMAND_TASK,
            (line, who.model_dump(mode="json")),
            plugin_key=plugin_key,
            chat=chat,
            user_id=who.user_id or None,
            timeout_seconds=timeout_seconds,
            call_id=call_id,
        )
        return [CommandResponse.model_validate(response) for response in _as_list(responses)]

    async def _take_question(self, chat_key: str, user_id: str) -> _Question | None:
        address = {"chat_key": chat_key, "user_key": user_id, "store_key": _STORE_KEY}
        kept = await self._store.get(COMMAND_OWNER, **address)
        # Only the caller that deletes the row has the question: of two concurrent answers one is refused.
        if kept is None or not await self._store.delete(COMMAND_OWNER, **address):
            return None
        return _Question.model_validate_json(kept)

    async def _keep_question(self, last: CommandResponse, line: str, chat_key: str, user_id: str) -> None:
        if last.status is not CommandResponseStatus.WAITING or not last.callback_cmd:
            return
        until = shared_time() + timedelta(seconds=last.wait_timeout) if last.wait_timeout else None
        question = _Question(
            command=self._callback(last.callback_cmd, line),
            text=last.message,
            context_data=last.context_data or {},
            until=until,
            on_timeout_message=last.on_timeout_message,
        )
        await self._keep(question, chat_key, user_id)

    async def _keep(self, question: _Question, chat_key: str, user_id: str) -> None:
        value = json.dumps(question.model_dump(), ensure_ascii=False, default=str)
        await self._store.set(
            COMMAND_OWNER, chat_key=chat_key, user_key=user_id, store_key=_STORE_KEY, value=value
        )

    def _callback(self, name: str, line: str) -> str:
        """Return the callback's full name if the plugin of the command has it, else the name as given."""
        key = self._find(line).plugin_key
        plugin = next(plugin for plugin in self._registry.plugins if plugin.key == key)
        return f"{key}:{name}" if any(command.name == name for command in plugin.commands) else name

    def _find(self, line: str) -> CommandEntry:
        return command_names(self._registry).find(line.split()[0])


def _as_list(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ResultError(
            f"a worker returned {type(value).__name__} for a command; expected a non-empty list of responses"
        )
    return value
