"""Plugin commands: a line is sent to a worker, which holds the plugins' state, and its responses return.

A command may ask a question (``CmdCtl.wait``). The question is stored per chat and user, so the
answer may arrive in another process; each question accepts one answer.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import PurePosixPath
from typing import Any, Final

from pydantic import BaseModel, Field

from broker_config.topology import COMMAND_TASK
from nekro.app.calls.plugin_tasks import PluginTasks
from nekro.app.catalogue.commands import command_names, is_command
from nekro.base.redaction import Redactor
from nekro.broker.calls import MethodCaller
from nekro.plugins.entries import CommandEntry
from nekro.plugins.entry_registry import Registry
from nekro.wire.invocation import Invocation
from nekro.wire.values import Arguments, encode_value, pickled_for
from nekro_agent.commands.ctl import CmdCtl
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandOutputSegmentType,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.commands.table import CommandTable
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import (
    BrokerUnavailableError,
    DownloadError,
    InvalidValueError,
    OverloadedError,
    ResultError,
    StorageUnavailableError,
    UploadQuotaError,
)
from nekro_agent.execution.invoke import Outcome
from nekro_agent.files import staging
from nekro_agent.files.file_system import FileSystem
from nekro_agent.methods import Lane
from nekro_agent.ports import ChatInfo, KeyValueStore
from nekro_agent.shared_clock import shared_time
from workers.calls.handler import CallTarget, OnStep, TaskSubject

__all__ = ["CommandLines", "CommandSender"]

_log = get_sub_logger("commands")
#: Owner of open questions in the store; cannot collide with plugin keys, which contain a dot.
_OWNER: Final = "nekro"
_STORE_KEY: Final = "open_question"


class CommandLines(CallTarget):
    """Runs command lines on a worker, each at most once because commands have effects."""

    subject = TaskSubject(name="command", plugin_key=_OWNER, lane=Lane.METHODS)
    is_claimed = True

    def __init__(self, table: CommandTable, redactor: Redactor, *, return_bytes: int) -> None:
        self._table = table
        self._redactor = redactor
        self._return_bytes = return_bytes

    async def run(self, invocation: Invocation, arguments: Arguments, on_step: OnStep) -> Outcome:
        """Run a line; the value is every response as JSON data."""
        (line, fields), _ = arguments
        context = CommandExecutionContext.model_validate({**fields, "message_id": invocation.call_id})
        responses = []
        async with staging.call_scope():
            async for response in self._table.run(line, context):
                await self._store_files(response, line, invocation)
                responses.append(self._plain(response))
        return Outcome(type=self.subject.type, value=responses)

    async def _store_files(self, response: CommandResponse, line: str, invocation: Invocation) -> None:
        """Copy the response's files to the chat's uploads, where the processes that show it find them."""
        parts = [part for part in response.output_segments or () if part.file_path]
        if not parts:
            return
        entry = self._table.find(line.split()[0])
        files = FileSystem(invocation.chat_key, invocation.container_key, plugin_key=entry.plugin.key)
        for part in parts:
            try:
                path = await files.bring_to_uploads(str(part.file_path), part.file_name or "")
            except (InvalidValueError, DownloadError, UploadQuotaError, OSError) as exc:
                _log.bind(command=entry.full_name).opt(exception=exc).warning("command_file_not_stored")
                name = part.file_name or PurePosixPath(str(part.file_path)).name
                part.text = f"{part.text}\n[the {part.type.value} {name} could not be sent]".lstrip()
                part.type, part.file_path = CommandOutputSegmentType.TEXT, None
            else:
                part.file_path, part.file_name = path, part.file_name or PurePosixPath(path).name

    def _plain(self, response: CommandResponse) -> dict[str, Any]:
        plain = response.model_dump(exclude={"data"}, mode="json", fallback=str)
        if response.status is CommandResponseStatus.ERROR:
            plain["message"] = self._redactor(response.message)
        try:
            is_plain = pickled_for(encode_value(response.data, max_bytes=self._return_bytes).decode()) is None
        except ResultError:
            is_plain = False
        # The texts are the answer; data attached for programs must not make the answer fail.
        plain["data"] = response.data if is_plain else str(response.data)
        return plain


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
        kept = await self._store.get(_OWNER, **address)
        # Only the caller that deletes the row has the question: of two concurrent answers one is refused.
        if kept is None or not await self._store.delete(_OWNER, **address):
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
        await self._store.set(_OWNER, chat_key=chat_key, user_key=user_id, store_key=_STORE_KEY, value=value)

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
