"""Plugin commands: a line is sent to a worker, which holds the plugins' state, and its responses return.

A command may ask a question (``CmdCtl.wait``). The question is stored per chat and user, so the
answer may arrive in another process; each question accepts one answer.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import BaseModel, Field

from broker_config.topology import COMMAND_TASK
from nekro.app.calls.plugin_tasks import PluginTasks
from nekro.app.catalogue.commands import command_names, is_command
from nekro.broker.calls import MethodCaller
from nekro.plugins.entries import CommandEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.commands.ctl import CmdCtl
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.errors import (
    BrokerUnavailableError,
    InvalidValueError,
    OverloadedError,
    ResultError,
    StorageUnavailableError,
)
from nekro_agent.ports import ChatInfo, KeyValueStore
from nekro_agent.shared_clock import shared_time

__all__ = ["COMMAND_OWNER", "CommandSender"]
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
