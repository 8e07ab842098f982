"""Plugin commands: a line is sent to a worker, which holds the plugins' state, and its responses return.

A command may ask a question (``CmdCtl.wait``). The question is stored per chat and user, so the
answer may arrive in another process; each question accepts one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pydantic import BaseModel, Field

from broker_config.settings import SandboxSettings
from broker_config.topology import COMMAND_TASK
from codec.values import decode_arguments, decode_value, encode_arguments, encode_value, pickled_for
from codec.wire import Envelope, Invocation, Signer, new_id
from messaging.calls import MethodCaller
from nekro_agent.commands.ctl import CmdCtl
from nekro_agent.commands.schemas import (
    CommandExecutionContext,
    CommandResponse,
    CommandResponseStatus,
)
from nekro_agent.commands.table import CommandTable
from nekro_agent.errors import BrokerUnavailableError, CallTimeoutError, InvalidValueError, ResultError
from nekro_agent.files import staging
from nekro_agent.methods import Lane, SandboxMethodType
from nekro_agent.ports import ChatInfo, KeyValueStore
from nekro_agent.shared_clock import shared_time
from runtime.redaction import Redactor
from workers.calls.claims import CallClaims
from workers.plugins.lanes import LaneChooser

__all__ = ["CommandDesk", "CommandExecutor"]

#: Owner of open questions in the store; cannot collide with plugin keys, which contain a dot.
_OWNER: Final = "nekro"
_STORE_KEY: Final = "open_question"


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """A command as a subject of claims (``workers.calls.claims.Claimable``)."""

    name: str
    plugin_key: str
    type: SandboxMethodType = SandboxMethodType.TOOL
    lane: Lane = Lane.METHODS


class CommandExecutor:
    """Runs command lines on a worker, each at most once because commands have effects."""

    def __init__(
        self,
        *,
        table: CommandTable,
        signer: Signer,
        claims: CallClaims,
        redactor: Redactor,
        sandbox_settings: SandboxSettings,
        worker_name: str,
    ) -> None:
        self._table = table
        self._signer = signer
        self._claims = claims
        self._redactor = redactor
        self._argument_bytes = sandbox_settings.argument_bytes
        self._return_bytes = sandbox_settings.return_bytes
        self._worker_name = worker_name

    async def execute(self, body: object) -> dict[str, Any]:
        """Run the line of a message body; returns the envelope with every response as JSON data.

        Raises:
            MessageRefusedError: the body is unsigned, altered or malformed.
            CallTimeoutError: its deadline passed in the queue.
            OutcomeUnknownError: a worker died during an earlier delivery of it.
        """
        invocation = self._signer.verify(body, task_name=COMMAND_TASK)
        if invocation.remaining_seconds() <= 0:
            raise CallTimeoutError(f"the deadline of command {invocation.call_id} passed in the queue")
        arguments, _ = decode_arguments(invocation.args, max_bytes=self._argument_bytes)
        line, fields = arguments
        context = CommandExecutionContext.model_validate(fields)
        subject = _Subject(name=line.partition(" ")[0], plugin_key=_OWNER)
        claim = await self._claims.claim(subject, invocation, worker=self._worker_name)
        if claim.envelope is not None:
            return claim.envelope.model_dump(mode="json")
        started_at = shared_time()
        try:
            responses = await self._run(line, context)
            value = encode_value(responses, max_bytes=self._return_bytes)
        except BaseException as exc:
            await self._claims.fail(claim, exc)
            raise
        envelope = Envelope.of(
            call_id=invocation.call_id,
            type=subject.type,
            value=value,
            worker=self._worker_name,
            started_at=started_at,
            finished_at=shared_time(),
        )
        return (await self._claims.finish(claim, invocation, envelope)).model_dump(mode="json")

    async def _run(self, line: str, context: CommandExecutionContext) -> list[dict[str, Any]]:
        async with staging.call_scope():
            return [self._plain(response) async for response in self._table.run(line, context)]

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


class CommandDesk:
    """Receives command lines and answers, and sends them to a worker."""

    def __init__(
        self,
        *,
        table: CommandTable,
        caller: MethodCaller,
        lanes: LaneChooser,
        refresh_lanes: Callable[[], Awaitable[None]],
        store: KeyValueStore,
        return_bytes: int,
    ) -> None:
        """Create the desk.

        Args:
            refresh_lanes: updates ``lanes``; awaited before each command.
        """
        self._refresh_lanes = refresh_lanes
        self._table = table
        self._caller = caller
        self._lanes = lanes
        self._store = store
        self._return_bytes = return_bytes

    async def run(
        self, line: str, *, chat: ChatInfo, who: CommandExecutionContext, timeout_seconds: float
    ) -> list[CommandResponse]:
        """Run ``/name arguments``, or answer the open question of a command.

        A line that begins with ``/`` is a command and discards an open question; any other line is
        the answer to one. User errors are returned as responses; the last response is final.

        Raises:
            InvalidValueError: no question is open.
            CallTimeoutError, BrokerUnavailableError, OutcomeUnknownError: as for calls of methods.
        """
        question = await self._take_question(chat.chat_key, who.user_id)
        if not line.lstrip().startswith("/"):
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
        responses = await self._send(line, chat, who, timeout_seconds)
        await self._keep_question(responses[-1], line, chat.chat_key, who.user_id)
        return responses

    async def _send(
        self, line: str, chat: ChatInfo, who: CommandExecutionContext, timeout_seconds: float
    ) -> list[CommandResponse]:
        await self._refresh_lanes()
        try:
            lane = self._lanes.lane_of_plugin(self._table.find(line.split()[0]).plugin.key)
        except InvalidValueError as exc:
            return [CmdCtl.failed(str(exc))]
        now = shared_time()
        arguments = encode_arguments((line, who.model_dump(mode="json")), {})
        invocation = Invocation(
            call_id=new_id(),
            method=COMMAND_TASK,
            chat_key=chat.chat_key,
            container_key=chat.container_key,
            user_id=who.user_id or None,
            adapter_key=chat.adapter_key,
            wakes_agent=False,
            issued_at=now,
            deadline=now + timedelta(seconds=timeout_seconds),
            args=arguments,
        )
        try:
            envelope = await self._caller.call(invocation, lane=lane)
        except asyncio.CancelledError:
            await self._revoke(invocation.call_id)
            raise
        plain = decode_value(envelope.value or "", max_bytes=self._return_bytes)
        return [CommandResponse.model_validate(response) for response in _as_list(plain)]

    async def _revoke(self, call_id: str) -> None:
        with contextlib.suppress(BrokerUnavailableError):  # the worker stops it at its deadline
            await self._caller.revoke(call_id)

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
        question = {
            "command": self._callback(last.callback_cmd, line),
            "text": last.message,
            "context_data": last.context_data or {},
            "until": until.isoformat() if until else None,
            "on_timeout_message": last.on_timeout_message,
        }
        value = json.dumps(question, ensure_ascii=False, default=str)
        await self._store.set(_OWNER, chat_key=chat_key, user_key=user_id, store_key=_STORE_KEY, value=value)

    def _callback(self, name: str, line: str) -> str:
        """Return the callback's full name if the plugin of the command has it, else the name as given."""
        plugin = self._table.find(line.split()[0]).plugin
        own = f"{plugin.key}:{name}"
        return own if any(command.name == name for command in plugin.commands) else name


def _as_list(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ResultError(
            f"a worker returned {type(value).__name__} for a command; expected a non-empty list of responses"
        )
    return value
