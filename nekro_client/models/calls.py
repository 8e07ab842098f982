"""Calls of methods, runs of code and commands, and approvals of calls."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import Field, JsonValue

from nekro_client.models.base import Answer, Body, ChatKey, PlainJson
from nekro_client.models.messages import FileInfo

__all__ = [
    "Approval",
    "Call",
    "CallBody",
    "Command",
    "CommandBody",
    "CommandPart",
    "CommandResponse",
    "CommandResult",
    "DecisionBody",
    "Level",
    "Run",
    "RunBody",
    "RunEventType",
    "TurnError",
]


class TurnError(Answer):
    """Why a turn failed."""

    code: str
    text: str


class Call(Answer):
    """A call of a method."""

    id: str
    method: str
    #: Type of the method: ``tool``, ``behavior``, ``agent``, ``multimodal_agent``.
    type: str
    #: ``awaiting`` (approval, or what its program waits for), ``queued``, ``running``, ``done``, ``failed``,
    #: ``unknown`` or ``cancelled``.
    state: str
    lane: str | None = None
    worker: str | None = None
    requested_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    duration_ms: float | None = None
    #: How often workers started it; None if that is not recorded.
    attempts: int | None = None
    #: The line of the round's code that made it, from 1, as the code itself said; None if it did not.
    line: int | None = None
    #: The attempt at the round that made it, from 1; None if that is not recorded.
    round_attempt: int | None = None
    #: Its arguments as JSON, without secrets; None if they are not recorded.
    arguments: JsonValue = None
    #: What it returned as JSON; bytes are ``{"base64": …}``.
    value: JsonValue = None
    error: TurnError | None = None
    #: The round that its result started.
    follow_up: str | None = None
    #: The request for approval that it waits for.
    approval_id: str | None = None


class RunBody(Body):
    """Code to run in a sandbox."""

    code: str
    chat_key: ChatKey
    user_id: str | None = None
    #: Whether an AGENT result requests a round.
    follow_up: bool = False
    #: Seconds until the run has ended, waiting for a worker included; code that still runs then is stopped.
    #: None means the fleet's own limits.
    timeout_seconds: float | None = Field(None, gt=0, le=86400)


class RunEventType(StrEnum):
    """Events of a streamed run besides ``output.chunk``; one of them is its last event."""

    #: Its data is the ``Run``.
    ENDED = "run.ended"
    #: The run failed without a report; its data is the ``Problem``.
    PROBLEM = "problem"


class Run(Answer):
    """The report of a run of code."""

    #: The ``call_id`` of its live events.
    id: str
    stop_type: str
    exit_code: int | None = None
    output: str
    #: Last line of the traceback, or the limit that ended the run; None if it succeeded.
    error: str | None = None
    calls: list[Call] = []
    #: Ids of the rounds that results requested.
    follow_ups: list[str] = []


class CallBody(Body):
    """A call of a method."""

    method: str = Field(max_length=500)
    chat_key: ChatKey
    args: list[PlainJson] = []
    kwargs: dict[str, PlainJson] = {}
    user_id: str | None = None
    #: Seconds; None means the limit of the method's lane.
    timeout_seconds: float | None = Field(None, gt=0, le=86400)


#: Permission level of a person.
Level = Literal["public", "user", "advanced", "super_user"]


class Command(Answer):
    """A command of a plugin."""

    name: str
    #: ``author.module:name``.
    full_name: str
    aliases: list[str] = []
    #: Lowest level that may run it: ``public``, ``user``, ``advanced`` or ``super_user``.
    permission: str
    usage: str = ""
    description: str = ""


class CommandBody(Body):
    """A command line of a person in a chat."""

    chat_key: ChatKey
    #: ``/name arguments``, or an answer to the last command that asked.
    line: str = Field(min_length=1, max_length=20_000)
    user_id: str | None = None
    #: Permission level of the person; the last two need the scope ``admin``.
    level: Level = "user"
    #: Seconds; None means the limit of calls.
    timeout_seconds: float | None = Field(None, gt=0, le=86400)


class CommandPart(Answer):
    """One part of a command's response."""

    type: str
    text: str = ""
    file_name: str | None = None
    mime_type: str | None = None
    web_url: str | None = None
    #: The file of a part of the type `image` or `file`, in the chat's uploads; None if it has been removed.
    file: FileInfo | None = None


class CommandResponse(Answer):
    """One response of a command."""

    #: ``processing``, ``waiting`` (for an answer), ``success`` or ``error``.
    status: str
    message: str = ""
    data: JsonValue = None
    output_segments: list[CommandPart] | None = None
    wait_options: list[str] | None = None
    #: Seconds.
    wait_timeout: float | None = None


class CommandResult(Answer):
    """The responses of a command, the last one with its final state."""

    status: str
    responses: list[CommandResponse]


class Approval(Answer):
    """A call that a person must approve before it runs, and the decision on it."""

    id: str
    #: By which people name it, in chats and on the command line; None from an earlier gateway.
    number: int | None = None
    call_id: str
    chat_key: str
    turn_id: str | None = None
    round_id: str | None = None
    #: The user on whose behalf the call is made.
    user_id: str | None = None
    method: str
    #: The call on one line: long arguments are cut, and end with `…`. None from an earlier gateway.
    summary: str | None = None
    #: What runs, exactly: the call as Python source. None in lists, like the next two.
    call: str | None = None
    #: ``{"args", "kwargs"}`` as JSON; what JSON lacks is in the nearest form.
    arguments: dict[str, JsonValue] | None = None
    #: A unified diff of the call as requested and as approved; None if they are equal.
    difference: str | None = None
    #: SHA-256 of method and arguments; what runs has this one.
    digest: str
    requested_at: datetime
    expires_at: datetime
    #: ``pending``, ``approved``, ``denied``, ``expired`` or ``cancelled``.
    state: str
    #: ``once``, ``turn`` or ``chat``; None unless it is approved.
    scope: str | None = None
    #: Until when it permits further calls of the method.
    grant_until: datetime | None = None
    revoked_at: datetime | None = None
    #: ``shell:NAME``, ``key:ID``, ``gateway`` (the local key) or ``chat:ADAPTER:USER``.
    decided_by: str | None = None
    decided_at: datetime | None = None
    reason: str | None = None
    is_edited: bool = False
    #: State of the call, and its error; None in lists.
    call_state: str | None = None
    call_error: TurnError | None = None


class DecisionBody(Body):
    """A decision on a call."""

    decision: Literal["approve", "deny"]
    #: What else an approval permits: further calls of the method in the same turn, or in the same chat.
    scope: Literal["once", "turn", "chat"] = "once"
    reason: str | None = Field(None, max_length=2000)
    #: Replace the arguments; both None keep them.
    args: list[PlainJson] | None = None
    kwargs: dict[str, PlainJson] | None = None
