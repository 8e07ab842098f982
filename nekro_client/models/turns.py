"""Turns with their rounds, and answers to posted messages."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import JsonValue

from nekro_client.models.base import Answer, Body, ChatKey
from nekro_client.models.calls import Call, TurnError
from nekro_client.models.jobs import Job
from nekro_client.models.messages import Message

__all__ = [
    "PostedMessage",
    "PromptMessage",
    "ReplayTurnBody",
    "ReplayedTurn",
    "Round",
    "RoundAttempt",
    "Turn",
    "TurnCause",
    "TurnState",
    "TurnSummary",
    "Wait",
]


class TurnState(StrEnum):
    """State of a turn."""

    #: Its first round has not started, or it waits: for the decisions of people that `waits_for` names, or
    #: its program for what `waits` has.
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


class Wait(Answer):
    """What a program waits for."""

    #: The call that it waits in.
    call_id: str
    #: ``job``, ``time`` or ``answer``.
    kind: str
    #: When the wait ends, at the latest.
    until: datetime | None = None
    job_id: str | None = None
    #: Who may answer; None: everyone of the chat.
    user_id: str | None = None
    #: What the person is asked. The next message of the person is the answer; a client may offer the choices
    #: as buttons that send their text as such a message.
    question: str | None = None
    choices: list[str] = []


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
    #: Whether it ran the program of the attempt before again, instead of asking the model.
    is_resumed: bool = False


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
    #: Why its program could not be run again after the death of its worker; None: it could.
    not_resumable: str | None = None
    exit_code: int | None = None
    calls: list[Call] = []
    error: TurnError | None = None


class Turn(Answer):
    """A turn: everything that one message, call, timer or job caused."""

    id: str
    chat_key: str
    state: TurnState
    #: The requests for approval that people have not decided, after its rounds have ended.
    waits_for: list[str] = []
    #: What its program waits for besides, without a process; it goes on in another turn.
    waits: list[Wait] = []
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
    #: What its program waits for besides, without a process; it goes on in another turn.
    waits: list[Wait] = []
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
    #: A call of the turn: its programs run again with the recorded answers of the calls before it, without a
    #: request to the model; this call and those after it are made. None: the model is asked anew.
    call_id: str | None = None


class ReplayedTurn(Answer):
    """A turn that runs again in a new chat."""

    chat_key: str
    #: None if a plugin blocked the message.
    message: Message | None
    #: None when the message starts no turn.
    turn_id: str | None
