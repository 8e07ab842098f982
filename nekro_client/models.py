"""The vocabulary of the HTTP API: bodies, answers and events.

The gateway, the client and ``--json`` output use these models; the OpenAPI document is generated from
them. Times are aware and in UTC. Bodies refuse unknown fields; answers of newer releases may have more
fields, which a client ignores.
"""

from __future__ import annotations

import math
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nekro_client.event_types import EventType

__all__ = [
    "Act",
    "AdapterAnswer",
    "AdapterRequestBody",
    "Answer",
    "ApiKey",
    "Approval",
    "Body",
    "Call",
    "CallBody",
    "CatalogueState",
    "ChatBody",
    "ChatKey",
    "ChatPlugin",
    "ChatPluginBody",
    "ChatPluginState",
    "ChatSummary",
    "ConsoleLogin",
    "ConsoleSession",
    "CreatedKey",
    "DeadLetter",
    "DecisionBody",
    "Event",
    "EventType",
    "FileInfo",
    "FilePart",
    "GivenTitle",
    "ImagePart",
    "Job",
    "JobAttempt",
    "JobLog",
    "JobLogEntry",
    "KeyBody",
    "KeyScope",
    "LaneBody",
    "LaneState",
    "McpReply",
    "McpReplyBody",
    "McpServer",
    "McpServerBody",
    "McpTool",
    "McpTrial",
    "Message",
    "MessageBody",
    "MessageSnippet",
    "Method",
    "NewFilePart",
    "NewImagePart",
    "NewPart",
    "NewWebhook",
    "Page",
    "Part",
    "PlainJson",
    "Plugin",
    "PluginConfig",
    "PluginConfigBody",
    "PluginState",
    "PluginVersion",
    "PostedMessage",
    "Problem",
    "Queue",
    "Queues",
    "ReplayBody",
    "ReplayTurnBody",
    "Replayed",
    "ReplayedTurn",
    "Reset",
    "RetryBody",
    "Round",
    "RoundAttempt",
    "Run",
    "RunBody",
    "RunEventType",
    "Series",
    "SeriesPoint",
    "SignalBody",
    "StoppedRound",
    "StreamTicket",
    "StreamTicketBody",
    "Summary",
    "TextPart",
    "Timer",
    "TimerBody",
    "Turn",
    "TurnCause",
    "TurnError",
    "TurnState",
    "TurnSummary",
    "Webhook",
    "WebhookBody",
    "WebhookChange",
    "WebhookDelivery",
    "WebhookPayload",
    "Work",
    "Worker",
]


Item = TypeVar("Item")
#: Faults of a body that are described one by one.
_MOST_FAULTS: Final = 100
#: Deepest nesting of JSON in a body.
MAX_DEPTH: Final = 64


def _bounded(value: JsonValue) -> JsonValue:
    """Refuse deep nesting, and numbers that JSON does not have."""
    waiting: list[tuple[JsonValue, int]] = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError("NaN and infinity are not JSON")
        if isinstance(item, dict):
            waiting.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            waiting.extend((inner, depth + 1) for inner in item)
    return value


def _named(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is not Unicode") from None
    return text


#: A JSON value of a body.
PlainJson = Annotated[JsonValue, AfterValidator(_bounded)]
#: The chat of a body; it names a directory.
ChatKey = Annotated[str, Field(min_length=1), AfterValidator(_named)]


class Body(BaseModel):
    """A request's body."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="wrap")
    @classmethod
    def _with_few_faults(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        # Each fault that is described takes a kilobyte; two bytes of a body can be one.
        try:
            return validate(value)
        except ValidationError as exc:
            count = exc.error_count()
            if count <= _MOST_FAULTS:
                raise
        raise PydanticCustomError("too_many_faults", "it has {count} faults", {"count": count})


class Answer(BaseModel):
    """A response's body, or a part of one."""

    # Validators are built at first use: a command needs few of them. (FastAPI takes no such bodies.)
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class Problem(Answer):
    """An error, as an RFC 9457 problem document (``application/problem+json``)."""

    type: str = "about:blank"
    title: str
    #: The HTTP status.
    status: int
    #: What went wrong, and what to do.
    detail: str
    #: Stable code of the error, for programs: ``not_found``, ``method_failed``, …
    code: str
    #: Identifies the request in logs and traces.
    request_id: str | None = None


class Page(Answer, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    #: Pass it as ``?cursor=`` to read the next page; None after the last one.
    next_cursor: str | None = None


# Messages


class TextPart(Answer):
    """Text of a message."""

    type: Literal["text"] = "text"
    text: str


class FileInfo(Answer):
    """A file of a chat."""

    id: str
    name: str
    #: Sandboxed code and plugins read it at this path: ``/app/uploads/…``.
    path: str
    media_type: str
    size_bytes: int
    #: SHA-256 of the content, in hexadecimal; None if it is not known.
    sha256: str | None = None
    created_at: datetime | None = None
    #: Where the API serves its content.
    url: str


class ImagePart(Answer):
    """A picture of a message."""

    type: Literal["image"] = "image"
    file: FileInfo


class FilePart(Answer):
    """A file of a message."""

    type: Literal["file"] = "file"
    file: FileInfo


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]


class NewImagePart(Body):
    """A picture to post: an uploaded file or the content itself."""

    type: Literal["image"] = "image"
    #: Id of an uploaded file of the chat; None if ``data_url`` has the content.
    file_id: str | None = None
    #: ``data:image/png;base64,…``.
    data_url: str | None = None
    name: str | None = None


class NewFilePart(Body):
    """A file to post: an uploaded file or the content itself."""

    type: Literal["file"] = "file"
    #: Id of an uploaded file of the chat; None if ``data_url`` has the content.
    file_id: str | None = None
    data_url: str | None = None
    name: str | None = None


class NewTextPart(Body):
    """Text to post."""

    type: Literal["text"] = "text"
    text: str


NewPart = Annotated[NewTextPart | NewImagePart | NewFilePart, Field(discriminator="type")]


class MessageBody(Body):
    """A person's message: ``text``, or ``parts``."""

    text: str | None = None
    parts: list[NewPart] = Field(default=[], max_length=64)
    #: The person; None means the key's user.
    user_id: str | None = None
    user_name: str | None = None
    #: Whether it is to the agent; a message that is not starts no turn unless a plugin demands it.
    to_agent: bool = True


class Message(Answer):
    """A message of a chat."""

    id: str
    #: Grows within a chat.
    sequence: int
    chat_key: str
    #: ``user``, ``assistant`` or ``system`` (a notice or result for the agent).
    kind: str
    sender_id: str | None = None
    sender_name: str | None = None
    text: str
    parts: list[Part] = []
    turn_id: str | None = None
    call_id: str | None = None
    round_id: str | None = None
    #: The plugin that wrote it; None if none did.
    plugin: str | None = None
    #: As it is recorded: segments, files, what a plugin added.
    data: dict[str, Any] | None = None
    created_at: datetime


class Summary(Answer):
    """A summary of the messages of a chat up to one of them."""

    chat_key: str
    #: Grows by 1 within a chat; the first one after a reset is 1.
    version: int
    #: Sequence of the newest message that it covers.
    up_to: int
    #: When the oldest and the newest of them were written.
    oldest_at: datetime
    newest_at: datetime
    text: str
    #: The model group that was asked, and the model that answered.
    group: str
    model: str
    #: Of this version alone; None if the endpoint did not report them.
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    tokens_estimated: bool = False
    cost: float = 0
    created_at: datetime


class MessageSnippet(Answer):
    """The beginning of a message."""

    id: str
    #: ``user`` or ``assistant``.
    kind: str
    sender_name: str | None = None
    #: At most 200 characters.
    text: str
    created_at: datetime


class ChatSummary(Answer):
    """A chat in a list."""

    chat_key: str
    #: The adapter of the chat's platform; None for a chat without one.
    adapter: str | None = None
    #: How people know it: the title that was given to it, else the platform's name, else the first words of
    #: its oldest message of a person; None without all of them.
    title: str | None = None
    #: The platform's name of it.
    name: str | None = None
    #: ``group`` or ``private``; None if it is not known.
    type: str | None = None
    created_at: datetime
    #: When something last happened in it.
    active_at: datetime
    #: Number of its newest event, for `?after=` of its stream; 0 without one.
    last_event: int
    #: The newest one that people see; None without one.
    last_message: MessageSnippet | None = None
    #: Rounds that wait or run.
    open_rounds: int = 0
    #: Turns that have failed since `failures_since`; None without it.
    failures: int | None = None


# Turns


class TurnState(StrEnum):
    """State of a turn."""

    #: Its first round has not started, or it waits for the decisions of people that `waits_for` names.
    WAITING = "waiting"
    RUNNING = "running"
    #: The agent has answered.
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TurnCause(Answer):
    """What started a turn."""

    #: ``message``, ``call``, ``timer``, ``round``, ``job`` or ``manual``.
    kind: str
    id: str
    #: The turn in which that happened, of a call or job of another turn; known in a turn's tree only.
    turn_id: str | None = None


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
    #: ``awaiting`` (approval), ``queued``, ``running``, ``done``, ``failed``, ``unknown`` or ``cancelled``.
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


class RoundAttempt(Answer):
    """One attempt at a round: a second one follows if the worker of the first died."""

    #: From 1.
    number: int
    worker: str | None = None
    started_at: datetime
    #: None while it runs, and of a lost one: no row records when its worker died.
    ended_at: datetime | None = None
    #: The newest event that is recorded of it.
    last_event_at: datetime | None = None
    #: ``running``, ``ended``, or ``lost``: its worker died or lost the chat.
    outcome: str


class PromptMessage(Answer):
    """One message of what was sent to the model."""

    #: ``system``, ``user`` or ``assistant``.
    role: str
    #: Texts, ``{"type": "text", "content": …}``, and images without their data: ``image`` with ``mime_type``,
    #: ``bytes`` and ``sha256``, or ``uri`` with ``uri``.
    parts: list[dict[str, JsonValue]]


class Round(Answer):
    """One round of the language model in a turn."""

    id: str
    turn_id: str
    #: Position in its turn, from 1.
    number: int
    #: ``requested``, ``running``, ``done``, ``failed``, ``cancelled`` or ``merged``.
    state: str
    cause: TurnCause
    attempt: int = 0
    #: All attempts, as far as they are recorded; in a turn's tree only.
    attempts: list[RoundAttempt] = []
    worker: str | None = None
    #: The user who began the turn; None if no user did.
    user_id: str | None = None
    #: The round that answered it, if it was merged into another one.
    merged_into: str | None = None
    requested_at: datetime
    started_at: datetime | None = None
    #: When the newest attempt asked the model; in a turn's tree only.
    prompted_at: datetime | None = None
    #: When the model had answered.
    answered_at: datetime | None = None
    finished_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    #: Characters of the prompt; None before it was sent.
    prompt_chars: int | None = None
    #: Whether what was sent to the model is kept (`NEKRO_AGENT__KEEP_PROMPTS`); in a turn's tree only.
    prompt_kept: bool = False
    #: What its newest request sent, without secrets, long texts cut; only with `prompts=true`, if it is kept.
    prompt: list[PromptMessage] | None = None
    #: The part of the result that caused it which the model sees.
    observation: str | None = None
    model: str | None = None
    #: The group of the model, and how many requests its answer took; in a turn's tree only.
    model_group: str | None = None
    model_tries: int | None = None
    #: Whether calls of `tool` methods are kept as events; otherwise they are known at the round's end only,
    #: without arguments and results.
    tool_calls_kept: bool = True
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: Whether tokens and cost are an estimate, because the endpoint reported no possible number of tokens.
    tokens_estimated: bool = False
    #: In the currency of the settings; None if prices are not set.
    cost: float | None = None
    answer: str | None = None
    code: str | None = None
    output: str | None = None
    #: Why the code stopped: ``NORMAL``, ``ERROR``, ``TIMEOUT``, ``AGENT``, …; None if none ran.
    stop_type: str | None = None
    exit_code: int | None = None
    calls: list[Call] = []
    error: TurnError | None = None


class Job(Answer):
    """A background job of a plugin."""

    id: str
    type: str
    plugin: str
    chat_key: str
    #: ``queued``, ``running``, ``done``, ``failed`` or ``cancelled``.
    state: str
    percent: int = 0
    message: str = ""
    #: The plugin's own name for it.
    task_id: str | None = None
    #: How many times it was started.
    attempt: int = 0
    worker: str | None = None
    #: What it reported last besides its message.
    data: JsonValue = None
    #: The turn whose call started it, and the call; None for a job that no call started.
    turn_id: str | None = None
    call_id: str | None = None
    #: The job that it repeats, which had failed or was cancelled.
    retry_of: str | None = None
    #: Whether ``POST /jobs/{id}/retry`` starts it again, unless a job of its name is open.
    can_retry: bool = False
    cancel_requested_at: datetime | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    updated_at: datetime | None = None
    finished_at: datetime | None = None


class JobAttempt(Answer):
    """One attempt at a job, by one worker."""

    #: From 1.
    number: int
    worker: str | None = None
    started_at: datetime
    #: None while it runs, and if its worker died: no row records when.
    ended_at: datetime | None = None
    #: ``running``, ``done``, ``failed``, ``cancelled``, ``released`` (its worker stopped), ``restarted``
    #: (after an outage) or ``lost`` (its worker died).
    outcome: str
    #: Why it ended.
    message: str = ""
    #: When it was last heard of.
    last_at: datetime


class JobLogEntry(Answer):
    """An entry of a job's log."""

    at: datetime
    #: ``started``, ``report`` (of progress), ``line`` (logged by the job's code), ``cancel_requested``, or
    #: how the attempt ended.
    kind: str
    attempt: int
    #: Of a start.
    worker: str | None = None
    #: Of a report.
    percent: int | None = None
    #: Of a line: ``INFO``, ``WARNING``, …
    level: str | None = None
    text: str = ""


class JobLog(Answer):
    """What happened to a job, the oldest first."""

    attempts: list[JobAttempt]
    #: Of reports and lines those among the newest 300 entries.
    entries: list[JobLogEntry]


class Turn(Answer):
    """A turn: everything that one message, call, timer or job caused."""

    id: str
    chat_key: str
    state: TurnState
    #: The requests for approval that people have not decided, after its rounds have ended.
    waits_for: list[str] = []
    cause: TurnCause
    #: The turn that answered it, if its first round was merged into a round of another turn.
    merged_into: str | None = None
    #: Its OpenTelemetry trace, in hexadecimal, and where that can be seen; None if it is not traced, or no
    #: place is configured.
    trace_id: str | None = None
    trace_url: str | None = None
    requested_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    #: Only of a failed turn.
    error: TurnError | None = None
    rounds: list[Round] = []
    messages: list[Message] = []
    jobs: list[Job] = []
    #: Later turns that its calls or jobs began: approved calls, calls that ended after its end, jobs.
    following: list[str] = []


class TurnSummary(Answer):
    """A turn in a list."""

    id: str
    chat_key: str
    state: TurnState
    #: The requests for approval that people have not decided, after its rounds have ended.
    waits_for: list[str] = []
    cause: TurnCause
    #: The turn that answered it, if its first round was merged into a round of another turn.
    merged_into: str | None = None
    #: The beginning of the message that caused it; None if none did.
    text: str | None = None
    user_id: str | None = None
    requested_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    #: Only of a failed turn.
    error: TurnError | None = None
    #: Number of its rounds.
    rounds: int
    #: Whether a round was started again because its worker died.
    has_retries: bool = False
    #: Models that answered.
    models: list[str] = []
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: Whether tokens and cost of a round are an estimate, because the endpoint reported no possible number.
    tokens_estimated: bool = False
    #: In the currency of the settings; None if prices are not set.
    cost: float | None = None


class PostedMessage(Answer):
    """Answer to a posted message."""

    message: Message | None
    #: None when it starts no turn.
    turn_id: str | None
    #: With ``?wait=``: the turn, if it ended in time.
    turn: Turn | None = None


class ReplayTurnBody(Body):
    """Where a turn runs again."""

    #: A chat that does not exist; None: one whose key begins with that of the turn's chat.
    chat_key: ChatKey | None = None


class ReplayedTurn(Answer):
    """A turn that runs again in a new chat."""

    chat_key: str
    #: None if a plugin blocked the message.
    message: Message | None
    #: None when the message starts no turn.
    turn_id: str | None


# Events


class ChangeKind(StrEnum):
    """What has changed: a list to read again. Those of the first group are sent per chat."""

    #: The chat's messages, so its entry in the list of chats too.
    CHATS = "chats"
    #: Its turns and rounds.
    TURNS = "turns"
    #: Also without a chat, which means jobs of any chat or of none.
    JOBS = "jobs"
    APPROVALS = "approvals"
    TIMERS = "timers"

    WORKERS = "workers"
    QUEUES = "queues"
    DEAD_LETTERS = "dead_letters"
    PLUGINS = "plugins"
    MCP_SERVERS = "mcp_servers"
    KEYS = "keys"
    COSTS = "costs"
    #: Administrative acts.
    AUDIT = "audit"

    #: Changes may have been missed: read everything again. Each stream begins with it unless it resumes.
    RESET = "reset"


class Change(Answer):
    """A hint that something has changed; several changes may be one hint."""

    kind: str
    #: None: of no chat, or of any.
    chat_key: str | None = None


class Event(Answer):
    """Something that happened in a chat."""

    #: Grows by 1 within a chat; None for live events.
    number: int | None = None
    type: str
    chat_key: str
    at: datetime
    turn_id: str | None = None
    round_id: str | None = None
    call_id: str | None = None
    message_id: str | None = None
    #: Depends on the type; see docs/api.md.
    data: dict[str, Any] = {}


# Code, calls, catalogue


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


class Method(Answer):
    """A method of the catalogue."""

    name: str
    task: str
    plugin: str
    type: str
    lane: str
    #: Why the lane is not the method's own; None if it is.
    lane_reason: str | None = None
    signature: str
    doc: str | None = None
    #: Whether a person must approve each call.
    requires_approval: bool = False


class PluginVersion(Answer):
    """What some workers serve of a plugin."""

    version: str = ""
    #: ``ok``, ``degraded``, ``starting``, ``failed`` or ``disabled``.
    status: str
    error: str | None = None
    #: Identifies its files; "" if that is not known.
    digest: str = ""
    #: Number of its methods.
    methods: int = 0
    #: When a worker served it first.
    published_at: datetime
    #: Names of the workers, the one that started first at the beginning.
    workers: list[str]


class Plugin(Answer):
    """A plugin of the catalogue."""

    key: str
    #: ``ok``, ``degraded``, ``starting``, ``failed`` or ``disabled``.
    status: str
    name: str = ""
    description: str = ""
    version: str = ""
    author: str = ""
    error: str | None = None
    placeholders: list[str] = []
    #: Whether its methods may be called.
    is_enabled: bool = True
    #: What workers serve of it, the version that callers see first.
    versions: list[PluginVersion] = []
    #: Its file on the hosts of the workers; None for keys, which only the local one sees.
    path: str | None = None


class CatalogueState(Answer):
    """Of what the lists of methods, commands and plugins are, and what is wrong with them."""

    #: Whether workers are live.
    is_live: bool
    #: What is listed while no worker is live; "" otherwise.
    note: str = ""
    #: Plugins that differ between workers or that some of them failed to load; settings without effect.
    warnings: list[str] = []
    #: Names of methods and commands that do not mean what their plugin intends.
    name_warnings: list[str] = []


class LaneBody(Body):
    """The lane of a method, or of a whole plugin."""

    #: ``methods`` or ``long`` for a method; ``pinned`` runs a plugin in one process of the fleet.
    lane: Literal["methods", "long", "pinned"]


class LaneState(Answer):
    """An operator's decision about a lane."""

    #: Task of the method, or key of the plugin.
    name: str
    #: None: the one of the plugin's code.
    lane: str | None = None
    #: Whether this request changed it.
    is_changed: bool


class PluginConfig(Answer):
    """The configuration of a plugin."""

    #: JSON schema of ``values``.
    schema_: dict[str, Any] = Field(alias="schema")
    #: Without secrets.
    values: dict[str, JsonValue]
    #: The secret fields (``group.field`` where nested), and whether each is set.
    secrets: dict[str, bool]


class PluginConfigBody(Body):
    """Fields of a configuration to change; the others keep their values."""

    values: dict[str, PlainJson] = Field(min_length=1)


class PluginState(Answer):
    """An operator's decision about a plugin."""

    key: str
    is_enabled: bool
    #: Whether this request changed it.
    is_changed: bool


class ChatPlugin(Answer):
    """A plugin that may sleep, in the next turn of a chat."""

    key: str
    name: str
    is_awake: bool
    #: None: it is asleep, or awake without a limit.
    turns_left: int | None = None
    #: What prompts show of it while it is asleep.
    brief: str


class ChatPluginBody(Body):
    """Whether a plugin is awake in a chat."""

    is_awake: bool
    #: For how many turns it is woken; None: without a limit.
    turns: int | None = Field(None, ge=1)


class ChatPluginState(Answer):
    """An operator's decision about a plugin in a chat."""

    key: str
    is_awake: bool
    #: Whether this request changed it.
    is_changed: bool


# MCP


class McpNote(Answer):
    """What is wrong with a tool that an MCP server lists, or with its listing."""

    #: Name of the tool, or its place; None for the whole listing.
    tool: str | None = None
    reason: str
    #: Whether the tool cannot be called; else the rest of it is used.
    is_left_out: bool = False


class McpServer(Answer):
    """A declared server of the Model Context Protocol; it is the plugin ``plugin``."""

    name: str
    plugin: str
    #: ``ok``, ``failed``, ``new`` (not listed with this declaration yet) or ``disabled``.
    status: str
    #: ``file`` or ``database``.
    source: str
    #: Whether the database declares it too; the file wins.
    is_in_both: bool = False
    #: ``stdio`` or ``http``; None if the declaration is faulty.
    transport: str | None = None
    #: Literal secrets are masked.
    declaration: dict[str, JsonValue] = {}
    #: Names of the tools as they were listed last.
    tools: list[str] = []
    #: On tools that the server describes wrongly.
    notes: list[McpNote] = []
    #: Name and version that it states.
    server: str = ""
    protocol: str = ""
    error: str | None = None
    listed_at: datetime | None = None


class McpServerBody(Body):
    """The declaration of an MCP server."""

    #: As an entry of ``mcp.json``: ``{"command", "args", "env"}`` or ``{"url", "headers"}``, and ``nekro``.
    declaration: dict[str, PlainJson]
    is_enabled: bool = True


class McpReplyBody(Body):
    """A person's answer to a question of an MCP server."""

    action: Literal["accept", "decline"]
    #: Values by the names of the fields of the question; ``""`` names the only one.
    content: dict[str, PlainJson] | None = None


class McpReply(Answer):
    """An answer that was passed on."""

    #: The call that asks.
    call_id: str


class McpTool(Answer):
    """A tool of an MCP server as a method."""

    name: str
    method: str
    signature: str
    requires_approval: bool
    runs_once: bool


class McpTrial(Answer):
    """What a worker found when it connected with a server."""

    name: str
    plugin: str
    #: None if the server works.
    error: str | None
    about: dict[str, JsonValue] | None
    #: How its process is confined; None for a server with a URL.
    confinement: dict[str, JsonValue] | None
    tools: list[McpTool]
    #: On tools that the server describes wrongly.
    notes: list[McpNote] = []


# Operation


class StoppedRound(Answer):
    """A round that was stopped."""

    id: str
    number: int
    state: str
    worker: str | None = None


class Reset(Answer):
    """The rounds that a reset of a chat stopped."""

    cancelled: list[StoppedRound] = []
    stopped: list[StoppedRound] = []
    #: They stop as soon as their workers read the request.
    still_running: list[StoppedRound] = []


class StreamTicketBody(Body):
    """Which stream a ticket is for."""

    #: The chat whose events it reads; None: it reads the stream of changes.
    chat_key: ChatKey | None = None


class StreamTicket(Answer):
    """The right to read an event stream without a key."""

    ticket: str
    #: Path and parameters of the stream, with the ticket; for a chat add ``&after=`` to begin after a number.
    path: str
    #: When browsers can no longer connect with it.
    expires_at: datetime


class ConsoleLogin(Body):
    """A browser logs in to the console with this key, or with the code of a link of `nekro up`."""

    key: str = Field(min_length=1, max_length=200, repr=False)


class ConsoleSession(Answer):
    """Who uses the console, and what it may do."""

    #: None: the local key.
    key_id: str | None
    name: str | None
    scopes: list[str]
    #: Pattern of the chat keys.
    chats: str
    #: The only user for whom the key acts; None: each request names one.
    user_id: str | None
    #: What the header `X-Nekro-CSRF` of each POST, PUT, PATCH and DELETE has; None without a session.
    csrf_token: str | None
    #: When the browser has to log in again; None without a session.
    expires_at: AwareDatetime | None


class SignalBody(Body):
    """A signal to a job that waits for it."""

    key: str = Field(min_length=1, max_length=200)
    data: PlainJson = None


class Timer(Answer):
    """A timer of a chat."""

    id: str
    #: ``once`` or ``recurring``.
    kind: str
    chat_key: str
    #: ``waiting`` or ``paused``.
    state: str
    #: None while a recurring timer is paused.
    fires_at: datetime | None
    description: str
    temporary: bool = False
    schedule: str | None = None
    timezone: str | None = None
    workday_mode: str | None = None
    title: str | None = None
    last_fired_at: datetime | None = None
    #: Worker in whose memory a timer with a callback is; such a timer cannot be changed. None for others.
    owner: str | None = None
    #: The plugin of the callback.
    plugin: str | None = None


#: What ``GET /costs`` can group by.
CostGroup = Literal["day", "chat", "user", "key", "plugin", "model"]


class Cost(Answer):
    """What one group used."""

    #: Day (UTC), chat, user (``adapter:id``), id of the key, plugin or model; "" for what belongs to none.
    key: str
    rounds: int
    #: Requests that were sent to models, also failed ones.
    requests: int
    #: Requests whose tokens and cost are an estimate: the endpoint reported no possible number of tokens, or
    #: they are running, or their worker died. The last two are not among ``requests``.
    estimated_requests: int = 0
    prompt_tokens: int
    completion_tokens: int
    #: By the prices in the settings.
    cost: float
    sandbox_seconds: float


class BudgetUse(Answer):
    """How much of one limit is used, estimates of running work included."""

    #: ``turn``, ``chat``, ``user``, ``key`` or ``day`` (the whole system).
    scope: str
    #: "" for the whole system.
    id: str
    #: ``tokens``, ``cost``, ``rounds``, ``sandbox_seconds``, or ``stored_bytes`` of a key.
    measure: str
    #: ``turn``, or the day (UTC); "" for ``stored_bytes``.
    period: str
    limit: float
    used: float
    #: As in ``Cost``; 0 where ``used`` is neither tokens nor cost.
    estimated_requests: int = 0
    #: When it begins anew; None for a turn, and for ``stored_bytes``.
    renews_at: datetime | None
    #: ``ok``, ``warned`` or ``exhausted``.
    state: str


class Costs(Page[Cost]):
    """One page of sums, and the budgets that were used today."""

    #: On the first page only.
    budgets: list[BudgetUse] = []


class SeriesPoint(Answer):
    """Figures of one interval."""

    begins_at: datetime
    #: Turns that ended, whatever their state; one that another turn answers is not counted.
    turns: int = 0
    failed: int = 0
    cancelled: int = 0
    #: How long half of these turns, and 95 % of them, took at most, from the request to the end; None: none
    #: ended.
    turn_p50_ms: int | None = None
    turn_p95_ms: int | None = None
    #: Requests that were sent to models, also failed ones.
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    #: By the prices in the settings.
    cost: float = 0.0


class Series(Answer):
    """Figures over time, in intervals of one length without gaps."""

    #: An hour for a range of up to three days, else a day (UTC).
    interval: Literal["hour", "day"]
    #: Begin of the first interval, and end of the range.
    since: datetime
    until: datetime
    #: From when the figures are complete, if the range has too many rows to count all; None: from the begin.
    complete_since: datetime | None = None
    points: list[SeriesPoint]


class ChatBody(Body):
    """A change of a chat."""

    #: Shown on one line, without invisible characters; None or an empty text takes the given title away.
    title: str | None = Field(max_length=200)


class GivenTitle(Answer):
    """The title that was given to a chat."""

    chat_key: str
    #: As it is stored; None: the chat has the platform's name or its first words.
    title: str | None = None


class TimerBody(Body):
    """A change of a timer."""

    state: Literal["waiting", "paused"]


class DeadLetter(Answer):
    """A message that no worker can run."""

    id: str
    task: str | None = None
    lane: str | None = None
    #: ``broker`` or ``refused``.
    source: str
    reason: str
    deliveries: int
    bytes: int
    #: ``valid`` or ``not valid``; None in lists.
    signature: str | None = None
    #: What is sent again: task, lane, chat, user, size of the arguments. None in lists, and if not valid.
    summary: str | None = None
    chat_key: str | None = None
    deadline: datetime | None = None


class RetryBody(Body):
    """How to send a dead letter again."""

    #: Seconds from now; None keeps the call's deadline.
    timeout_seconds: float | None = Field(None, gt=0, le=86400)


class Worker(Answer):
    """A worker process that published its plugins."""

    id: str
    name: str
    lane: str
    host: str
    pid: int
    started_at: datetime
    #: Whether it renews its lease.
    is_live: bool
    #: Version of nekro-workers that it runs; None if it does not say.
    release: str | None = None
    #: When it counts as dead unless it renews its lease before; None: it has stopped.
    lease_until: datetime | None = None
    #: Recorded calls that it runs. Calls of `tool` methods are not recorded, so they are not counted.
    running_calls: int = 0
    running_rounds: int = 0
    running_jobs: int = 0


class Queue(Answer):
    """A lane's queue."""

    lane: str
    waiting: int
    held: int | None = None
    oldest_seconds: float | None = None


class Work(Answer):
    """Rows of one kind that have not ended."""

    waiting: int
    running: int
    oldest_seconds: float


class Queues(Answer):
    """What waits and runs."""

    queues: list[Queue]
    rounds: Work
    jobs: Work
    #: None for brokers other than Redis.
    dead_letters: int | None


# Keys

#: What a key may do.
KeyScope = Literal["read", "post", "call", "run", "approve", "admin"]


class KeyBody(Body):
    """A key to create."""

    name: str = Field(min_length=1, max_length=200)
    scopes: list[KeyScope] = Field(min_length=1)
    #: Pattern of the chat keys: ``*`` any text, ``?`` one character, ``[ab]`` one of them.
    chats: str = Field("*", min_length=1, max_length=500)
    #: The only user for whom it acts; None: each request names one.
    user_id: str | None = None
    #: None: as the settings of the gateway say; 0: no limit.
    requests_per_minute: int | None = Field(None, ge=0, le=1_000_000)
    #: Limits per day (UTC) of the turns that it starts; None: no limit.
    cost_per_day: float | None = Field(None, ge=0, allow_inf_nan=False)
    tokens_per_day: int | None = Field(None, ge=0, le=10**15)
    #: Most bytes that it may keep stored; None: as the settings say; 0: no limit.
    stored_bytes_limit: int | None = Field(None, ge=0, le=10**15)
    #: RFC 3339 with an offset; None: never.
    expires_at: AwareDatetime | None = None


class ApiKey(Answer):
    """A key, without its secret."""

    id: str
    name: str
    scopes: list[str]
    chats: str
    user_id: str | None = None
    requests_per_minute: int | None = None
    cost_per_day: float | None = None
    tokens_per_day: int | None = None
    stored_bytes_limit: int | None = None
    #: What it keeps stored now.
    stored_bytes: int = 0
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class CreatedKey(ApiKey):
    """A new key."""

    #: The key itself; it is not stored and cannot be shown again.
    key: str


class Act(Answer):
    """An administrative act."""

    id: str
    at: datetime
    #: The key; None: the local key, or a command.
    key_id: str | None = None
    action: str
    subject: str
    data: dict[str, Any] | None = None
    request_id: str | None = None


# Outgoing webhooks


class WebhookBody(Body):
    """A subscription of a URL to events."""

    url: str = Field(max_length=2000)
    #: Patterns of event types: ``message.sent``, ``turn.*``.
    events: list[str] = Field(["*"], min_length=1, max_length=50)
    #: Pattern of the chat keys.
    chats: str = Field("*", max_length=200)
    description: str = Field("", max_length=500)


class WebhookChange(Body):
    """What changes of a subscription; None keeps a value."""

    url: str | None = Field(None, max_length=2000)
    events: list[str] | None = Field(None, min_length=1, max_length=50)
    chats: str | None = Field(None, max_length=200)
    description: str | None = Field(None, max_length=500)
    is_active: bool | None = None


class Webhook(Answer):
    """A subscription of a URL to events."""

    id: str
    url: str
    description: str
    events: list[str]
    chats: str
    is_active: bool
    #: Why it was deactivated; None if an operator did, or if it is active.
    fault: str | None = None
    created_at: datetime


class NewWebhook(Webhook):
    """A subscription with its secret, which is not shown again."""

    #: ``whsec_…``, for libraries of Standard Webhooks.
    secret: str


class WebhookPayload(Answer):
    """Body of a delivery."""

    type: str
    timestamp: datetime
    data: Event


class WebhookDelivery(Answer):
    """The delivery of one event."""

    #: The header ``webhook-id`` of every attempt.
    id: str
    chat_key: str
    event_number: int
    type: str
    #: ``waiting``, ``done`` or ``dead``.
    state: str
    attempts: int
    #: When the next attempt is due; None if it has ended.
    due_at: datetime | None = None
    #: HTTP status of the last answer; None without one.
    status: int | None = None
    error: str | None = None
    created_at: datetime
    finished_at: datetime | None = None


class ReplayBody(Body):
    """What to deliver again."""

    #: An ended delivery; None means every dead letter.
    delivery_id: str | None = None


class Replayed(Answer):
    """Answer to a replay."""

    #: Number of deliveries that are due again.
    count: int


# Clients of adapters


class AdapterRequestBody(Body):
    """A question to the client that connects a channel."""

    channel_id: str = Field(min_length=1, max_length=200)
    request: Literal["get_user_info", "get_channel_info", "get_self_info", "set_message_reaction"]
    data: dict[str, JsonValue] = {}
    #: How long to wait for the answer.
    timeout_seconds: float = Field(30, gt=0, le=120)


class AdapterAnswer(Answer):
    """What a client answered."""

    data: dict[str, Any]
