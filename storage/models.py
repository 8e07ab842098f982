"""The tables of the database.

Rows of a chat are ordered by ``sequence``. A transaction locks the chat's row before it adds
one (``ChatRepository.lock``), so within a chat a larger sequence was committed later.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    false,
    text,
    true,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from nekro_agent.methods import Lane, SandboxMethodType
from nekro_agent.ports import MessageKind, WorkdayMode
from storage.states import (
    ApprovalScope,
    ApprovalState,
    CallState,
    CrashPolicy,
    DeliveryState,
    JobLogKind,
    JobState,
    OverrideSource,
    RoundState,
    SendState,
    StoredKind,
    TimerState,
    TriggerKind,
)
from storage.types import FaithfulText, JsonText, KeyText, StateText, UtcDateTime

__all__ = [
    "AdapterClientRow",
    "AdapterSendRow",
    "AdapterSubscriptionRow",
    "ApiKeyRow",
    "ApprovalRow",
    "AuditRow",
    "Base",
    "CallRow",
    "ChatEventRow",
    "ChatRow",
    "ChatSummaryRow",
    "CronJobRow",
    "DownloadRow",
    "JobLogRow",
    "JobRow",
    "JobSignalRow",
    "KeyStorageRow",
    "KeyTurnRow",
    "LaneOverrideRow",
    "LeaseColumns",
    "LeaseRow",
    "McpServerRow",
    "MessageRow",
    "OpenAIResponseRow",
    "PluginSnapshotRow",
    "PluginStateRow",
    "PluginValueRow",
    "PresetRow",
    "RequestRow",
    "RoundPromptRow",
    "RoundRow",
    "SpendingRow",
    "SpendingTotalRow",
    "TimerRow",
    "TurnTermRow",
    "TurnVariablesRow",
    "UploadAreaRow",
    "UserRow",
    "WebhookCursorRow",
    "WebhookDeliveryRow",
    "WebhookRow",
    "WorkerPluginRow",
    "WorkerRow",
    "WorkerSiteRow",
    "WorkerTimerRow",
]

_Sequence = BigInteger().with_variant(Integer, "sqlite")
#: SQLite: never reuse a sequence number after the newest row was deleted.
_ORDERED = {"sqlite_autoincrement": True}


class Base(DeclarativeBase):
    """Root of the models; names of constraints are fixed so that migrations can change them."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        str: FaithfulText(),
        bytes: LargeBinary(),
        datetime: UtcDateTime(),
        **{
            states: StateText(states)
            for states in (
                ApprovalScope, ApprovalState, CallState, CrashPolicy, DeliveryState, JobLogKind,
                JobState, Lane, MessageKind, OverrideSource, RoundState, SandboxMethodType, SendState,
                StoredKind, TimerState, TriggerKind, WorkdayMode,
            )
        },
    }  # fmt: skip


def _chat_key(**options: Any) -> Mapped[str]:
    return mapped_column(KeyText(), ForeignKey("chats.chat_key", ondelete="CASCADE"), **options)


def _sequence() -> Mapped[int]:
    return mapped_column(_Sequence, Identity(), primary_key=True)


class LeaseColumns:
    """Columns of a lease: holder, expiry and fencing token, which each acquisition increments."""

    owner: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    fence: Mapped[int] = mapped_column(BigInteger(), default=0)


class PluginValueRow(Base):
    """One value of ``plugin.store``."""

    __tablename__ = "plugin_values"

    #: SHA-256 of the four keys, which may be longer than an index entry.
    digest: Mapped[bytes] = mapped_column(primary_key=True)
    plugin_key: Mapped[str] = mapped_column(KeyText(), index=True)
    chat_key: Mapped[str]
    user_key: Mapped[str]
    store_key: Mapped[str]
    value: Mapped[str]
    #: 1 when created, incremented by each ``set``; lets one statement distinguish the two.
    revision: Mapped[int] = mapped_column(BigInteger())
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class ChatRow(LeaseColumns, Base):
    """A chat, with the lease of the worker that runs its rounds and its sandbox area."""

    __tablename__ = "chats"

    chat_key: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    container_key: Mapped[str] = mapped_column(KeyText(), unique=True)
    adapter_key: Mapped[str | None]
    channel_id: Mapped[str | None]
    channel_name: Mapped[str | None]
    channel_type: Mapped[str | None]
    #: The title that was given over the API; None: it follows from the channel's name or the first message.
    title: Mapped[str | None]
    created_at: Mapped[datetime]
    #: The last message before a reset; the LLM sees newer ones only.
    history_after: Mapped[int] = mapped_column(BigInteger(), default=0)
    #: When the chat was last reset.
    reset_at: Mapped[datetime | None]
    #: The agent's persona in this chat; None means that of the settings.
    preset_id: Mapped[int | None] = mapped_column(BigInteger())
    is_active: Mapped[bool] = mapped_column(server_default=true(), default=True)
    #: Whether the agent reads along without starting turns.
    observe_mode: Mapped[bool] = mapped_column(server_default=false(), default=False)
    #: The model group of the chat; None means ``default``.
    model_group: Mapped[str | None]
    #: Counts changes and deletions of messages.
    history_revision: Mapped[int] = mapped_column(BigInteger(), server_default=text("0"), default=0)
    #: Number of the chat's newest event.
    last_event: Mapped[int] = mapped_column(BigInteger(), server_default=text("0"), default=0)
    #: When the newest event was added; None: before there was this column.
    active_at: Mapped[datetime | None]
    #: Unused: ``nekro.sandbox.shared`` goes by the directory's times. Kept while older releases may
    #: run.
    shared_used_at: Mapped[datetime | None] = mapped_column(index=True)


class MessageRow(Base):
    """A message of a chat's history."""

    __tablename__ = "messages"

    sequence: Mapped[int] = _sequence()
    id: Mapped[str] = mapped_column(KeyText(), unique=True)
    chat_key: Mapped[str] = _chat_key()
    kind: Mapped[MessageKind]
    sender_id: Mapped[str | None]
    sender_name: Mapped[str | None]
    text: Mapped[str]
    data: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    call_id: Mapped[str | None] = mapped_column(KeyText())
    round_id: Mapped[str | None]
    #: The turn that it started or that sent it; None for a message of no turn, and of releases before 0.2.
    turn_id: Mapped[str | None] = mapped_column(KeyText(), index=True)
    plugin_key: Mapped[str | None]
    #: Deduplication key, such as ``observation:<call id>``.
    once_key: Mapped[str | None] = mapped_column(KeyText(), unique=True)
    created_at: Mapped[datetime] = mapped_column(index=True)

    __table_args__ = (Index("ix_messages_chat_key_sequence", "chat_key", "sequence"), _ORDERED)


class ChatEventRow(Base):
    """Something that happened in a chat, for readers of its stream.

    There is no foreign key to the chat: the number comes from the chat's row, so the row exists.
    """

    __tablename__ = "chat_events"

    chat_key: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: Grows by 1 within a chat, in the order of commits.
    number: Mapped[int] = mapped_column(BigInteger(), primary_key=True, autoincrement=False)
    type: Mapped[str]
    turn_id: Mapped[str | None] = mapped_column(KeyText(), index=True)
    round_id: Mapped[str | None]
    call_id: Mapped[str | None]
    message_id: Mapped[str | None]
    data: Mapped[dict[str, Any]] = mapped_column(JsonText())
    #: When it happened, by the shared clock; not in the order of numbers.
    created_at: Mapped[datetime] = mapped_column(index=True)


class UserRow(Base):
    """A person who has written in a chat of an adapter; ``""`` is the adapter of chats without one."""

    __tablename__ = "users"

    id: Mapped[int] = _sequence()
    adapter_key: Mapped[str] = mapped_column(KeyText())
    platform_userid: Mapped[str] = mapped_column(KeyText())
    username: Mapped[str]
    perm_level: Mapped[int] = mapped_column(default=0)
    ban_until: Mapped[datetime | None]
    prevent_trigger_until: Mapped[datetime | None]
    ext_data: Mapped[Any | None] = mapped_column(JsonText())
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    __table_args__ = (
        Index("uq_users_platform_userid_adapter_key", "platform_userid", "adapter_key", unique=True),
        _ORDERED,
    )


class ChatSummaryRow(Base):
    """A summary of the older messages of a chat; a message that it covers and that changes deletes it."""

    __tablename__ = "chat_summaries"

    chat_key: Mapped[str] = _chat_key(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    #: Sequence of the newest message that it covers.
    up_to: Mapped[int] = mapped_column(BigInteger())
    #: When the oldest and the newest of them were written.
    oldest_at: Mapped[datetime] = mapped_column(index=True)
    newest_at: Mapped[datetime]
    text: Mapped[str]
    group_name: Mapped[str]
    model: Mapped[str]
    prompt_tokens: Mapped[int | None]
    answer_tokens: Mapped[int | None]
    #: Whether the endpoint reported no possible number of tokens.
    tokens_estimated: Mapped[bool] = mapped_column(server_default=false(), default=False)
    cost: Mapped[float]
    created_at: Mapped[datetime]


class TurnVariablesRow(Base):
    """Variables of the programs of an open turn, for its next program."""

    __tablename__ = "turn_variables"

    turn_id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    chat_key: Mapped[str] = _chat_key()
    round_id: Mapped[str]
    #: Tagged text of each variable by its name; only a sandbox reads it.
    kept: Mapped[dict[str, str]] = mapped_column(JsonText())
    #: Names of variables that were not kept.
    not_kept: Mapped[list[str]] = mapped_column(JsonText())
    updated_at: Mapped[datetime] = mapped_column(index=True)

    __table_args__ = (Index("ix_turn_variables_chat_key", "chat_key"),)


class PresetRow(Base):
    """A stored persona."""

    __tablename__ = "presets"

    id: Mapped[int] = _sequence()
    name: Mapped[str]
    title: Mapped[str] = mapped_column(default="")
    avatar: Mapped[str] = mapped_column(default="")
    content: Mapped[str] = mapped_column(default="")
    description: Mapped[str] = mapped_column(default="")
    #: Comma-separated.
    tags: Mapped[str] = mapped_column(default="")
    author: Mapped[str] = mapped_column(default="")
    remote_id: Mapped[str | None]
    on_shared: Mapped[bool] = mapped_column(default=False)
    ext_data: Mapped[Any | None] = mapped_column(JsonText())
    #: Identifies the effect of a call (``nekro_agent.execution.effects``), which may be repeated.
    once_key: Mapped[str | None] = mapped_column(KeyText())
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]

    __table_args__ = (Index("uq_presets_once_key", "once_key", unique=True), _ORDERED)


class CallRow(Base):
    """A call that must have at most one effect, or must not be lost.

    There is no foreign key to the chat, because every claim would have to check it.
    """

    __tablename__ = "calls"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    method: Mapped[str]
    type: Mapped[SandboxMethodType]
    chat_key: Mapped[str] = mapped_column(KeyText())
    round_id: Mapped[str | None] = mapped_column(KeyText(), index=True)
    lane: Mapped[str | None]
    state: Mapped[CallState]
    #: Whether it may run again when its worker died while running it.
    repeatable: Mapped[bool]
    #: Claims so far; a claim's number is its fencing token.
    fence: Mapped[int] = mapped_column(BigInteger(), default=0)
    worker: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    requested_at: Mapped[datetime]
    #: When the message was last published to the broker.
    published_at: Mapped[datetime | None]
    deadline: Mapped[datetime | None]
    #: Since when the caller no longer waits for the result, which goes to the chat instead.
    detached_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    #: The message's body, for publishing it again; None for calls that are not published again.
    invocation: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    outcome: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    error_type: Mapped[str | None]
    error_message: Mapped[str | None]

    __table_args__ = (
        Index(
            "ix_calls_open",
            "requested_at",
            postgresql_where=text("state IN ('queued', 'running')"),
            sqlite_where=text("state IN ('queued', 'running')"),
        ),
        Index("ix_calls_finished_at", "finished_at"),
    )


class ApprovalRow(Base):
    """A request for approval of one call, and the decision on it."""

    __tablename__ = "approvals"

    sequence: Mapped[int] = _sequence()
    id: Mapped[str] = mapped_column(KeyText(), unique=True)
    call_id: Mapped[str] = mapped_column(KeyText(), unique=True)
    chat_key: Mapped[str] = _chat_key()
    #: Turn and round of the call; None outside rounds.
    turn_id: Mapped[str | None]
    round_id: Mapped[str | None]
    #: The turn that began the work: its approved calls begin further turns, which share its grants.
    root_turn_id: Mapped[str | None] = mapped_column(KeyText(), index=True)
    user_id: Mapped[str | None]
    method: Mapped[str] = mapped_column(KeyText())
    lane: Mapped[str]
    #: Tagged text, as the caller wrote it.
    arguments: Mapped[str]
    #: Tagged text that runs instead; None: the approver changed nothing.
    edited_arguments: Mapped[str | None]
    #: SHA-256 of the method and the arguments that run, in hexadecimal.
    digest: Mapped[str]
    requested_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    state: Mapped[ApprovalState]
    scope: Mapped[ApprovalScope | None]
    #: Until when an approval of scope TURN or CHAT permits further calls.
    grant_until: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    decided_by: Mapped[str | None]
    decided_at: Mapped[datetime | None] = mapped_column(index=True)
    reason: Mapped[str | None]
    #: Signature of an approval, without which the row permits nothing.
    seal: Mapped[str | None]

    __table_args__ = (
        Index(
            "ix_approvals_pending",
            "expires_at",
            postgresql_where=text("state = 'pending'"),
            sqlite_where=text("state = 'pending'"),
        ),
        Index(
            "ix_approvals_granted",
            "chat_key",
            "method",
            postgresql_where=text("state = 'approved' AND scope IN ('turn', 'chat')"),
            sqlite_where=text("state = 'approved' AND scope IN ('turn', 'chat')"),
        ),
        Index("ix_approvals_chat_key_sequence", "chat_key", "sequence"),
        _ORDERED,
    )


class RoundRow(Base):
    """One round of the LLM: its trigger, its progress and its outcome."""

    __tablename__ = "rounds"

    sequence: Mapped[int] = _sequence()
    id: Mapped[str] = mapped_column(KeyText(), unique=True)
    chat_key: Mapped[str] = _chat_key()
    turn_id: Mapped[str] = mapped_column(KeyText(), index=True)
    #: The turn whose work caused the turn; both are in one trace.
    root_turn_id: Mapped[str | None] = mapped_column(KeyText())
    #: Position in its turn, from 1.
    number: Mapped[int]
    trigger_kind: Mapped[TriggerKind]
    trigger_id: Mapped[str] = mapped_column(KeyText())
    state: Mapped[RoundState]
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(BigInteger(), default=0)
    worker: Mapped[str | None]
    merged_into: Mapped[str | None] = mapped_column(KeyText(), index=True)
    requested_at: Mapped[datetime]
    not_before: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None] = mapped_column(index=True)
    cancel_requested_at: Mapped[datetime | None]
    user_id: Mapped[str | None]
    observation: Mapped[str | None]
    segments: Mapped[list[dict[str, Any]] | None] = mapped_column(JsonText())
    prompt_chars: Mapped[int | None]
    model: Mapped[str | None]
    answer: Mapped[str | None]
    answered_at: Mapped[datetime | None]
    code: Mapped[str | None]
    stop_type: Mapped[int | None]
    exit_code: Mapped[int | None]
    output: Mapped[str | None]
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    #: Whether the endpoint reported no possible number of tokens; None before the model answers.
    tokens_estimated: Mapped[bool | None]
    cost: Mapped[float | None]
    calls: Mapped[list[dict[str, Any]] | None] = mapped_column(JsonText())
    error: Mapped[str | None]
    #: Of a turn's first round, when the turn has ended: the state of its event ``turn.ended``.
    turn_state: Mapped[str | None]
    #: Of a turn's first round, when the turn has ended: the sum of its rounds.
    turn_cost: Mapped[float | None]

    __table_args__ = (
        # Lists of turns: first rounds, the newest first, with what filters read.
        Index(
            "ix_rounds_turns",
            "requested_at",
            "sequence",
            "chat_key",
            "turn_cost",
            postgresql_where=text("id = turn_id"),
            sqlite_where=text("id = turn_id"),
        ),
        Index(
            "ix_rounds_turn_state",
            "turn_state",
            "requested_at",
            "sequence",
            postgresql_where=text("id = turn_id"),
            sqlite_where=text("id = turn_id"),
        ),
        Index("uq_rounds_trigger_kind_trigger_id", "trigger_kind", "trigger_id", unique=True),
        Index("ix_rounds_chat_key_sequence", "chat_key", "sequence"),
        # The database itself enforces at most one running round per chat.
        Index(
            "uq_rounds_running",
            "chat_key",
            unique=True,
            postgresql_where=text("state = 'running'"),
            sqlite_where=text("state = 'running'"),
        ),
        Index(
            "ix_rounds_open",
            "chat_key",
            "not_before",
            postgresql_where=text("state IN ('requested', 'running')"),
            sqlite_where=text("state IN ('requested', 'running')"),
        ),
        _ORDERED,
    )


class RoundPromptRow(Base):
    """What the newest request of a round sent to the model (``NEKRO_AGENT__KEEP_PROMPTS``)."""

    __tablename__ = "round_prompts"

    round_id: Mapped[str] = mapped_column(
        KeyText(), ForeignKey("rounds.id", ondelete="CASCADE"), primary_key=True
    )
    #: Messages as JSON, without secrets and without the data of images; long texts are cut.
    prompt: Mapped[str]
    sent_at: Mapped[datetime] = mapped_column(index=True)


class TurnTermRow(Base):
    """A word by which turns are found: a model that answered, or a plugin that was called."""

    __tablename__ = "turn_terms"

    #: Of the turn's first round.
    sequence: Mapped[int] = mapped_column(
        _Sequence, ForeignKey("rounds.sequence", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    #: As of ``storage.listings.turn_search``.
    term: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: When the turn was requested.
    requested_at: Mapped[datetime]

    __table_args__ = (Index("ix_turn_terms_term", "term", "requested_at", "sequence"),)


class TimerRow(Base):
    """A one-time timer of a chat."""

    __tablename__ = "timers"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    chat_key: Mapped[str] = _chat_key(index=True)
    fire_at: Mapped[datetime]
    description: Mapped[str]
    temporary: Mapped[bool]
    state: Mapped[TimerState]
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_timers_state_fire_at", "state", "fire_at"),)


class CronJobRow(Base):
    """A recurring timer of a chat."""

    __tablename__ = "cron_jobs"

    job_id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    chat_key: Mapped[str] = _chat_key(index=True)
    cron_expr: Mapped[str]
    timezone: Mapped[str]
    workday_mode: Mapped[WorkdayMode]
    title: Mapped[str | None]
    event_desc: Mapped[str]
    #: None while paused.
    next_fire_at: Mapped[datetime | None] = mapped_column(index=True)
    last_fired_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class JobRow(Base):
    """A background job of a plugin."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    type: Mapped[str] = mapped_column(KeyText())
    #: The plugin's own name for it; at most one open job per plugin, type and task id.
    task_id: Mapped[str] = mapped_column(KeyText())
    plugin_key: Mapped[str]
    chat_key: Mapped[str] = mapped_column(KeyText(), index=True)
    #: The call that started it, with its round and turn; None for a job that no call started.
    call_id: Mapped[str | None]
    round_id: Mapped[str | None]
    turn_id: Mapped[str | None] = mapped_column(KeyText(), index=True)
    #: The job that it repeats; None: it repeats none.
    retry_of: Mapped[str | None]
    state: Mapped[JobState]
    on_crash: Mapped[CrashPolicy]
    percent: Mapped[int] = mapped_column(default=0)
    message: Mapped[str] = mapped_column(default="")
    data: Mapped[Any | None] = mapped_column(JsonText())
    args: Mapped[Any | None] = mapped_column(JsonText())
    attempt: Mapped[int] = mapped_column(default=0)
    fence: Mapped[int] = mapped_column(BigInteger(), default=0)
    worker: Mapped[str | None]
    lease_until: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    published_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    updated_at: Mapped[datetime] = mapped_column(index=True)
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        Index(
            "uq_jobs_open",
            "plugin_key",
            "type",
            "task_id",
            unique=True,
            postgresql_where=text("state IN ('queued', 'running')"),
            sqlite_where=text("state IN ('queued', 'running')"),
        ),
    )


class JobLogRow(Base):
    """An entry of a background job's log; ``storage.repositories.job_log`` limits their number."""

    __tablename__ = "job_log"

    job_id: Mapped[str] = mapped_column(
        KeyText(), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    #: Grows within a job.
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[JobLogKind]
    #: The attempt during which it was added; 0: before the first.
    attempt: Mapped[int]
    #: Of a start.
    worker: Mapped[str | None]
    #: Of a report.
    percent: Mapped[int | None]
    #: Of a log record.
    level: Mapped[str | None]
    text: Mapped[str]
    at: Mapped[datetime]


class JobSignalRow(Base):
    """A signal to a job that it has not taken yet, or the job's wait for one."""

    __tablename__ = "job_signals"

    job_id: Mapped[str] = mapped_column(
        KeyText(), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True
    )
    key: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    data: Mapped[Any | None] = mapped_column(JsonText())
    created_at: Mapped[datetime]


class LaneOverrideRow(Base):
    """A lane override of a method, set by the watchdog or an operator."""

    __tablename__ = "method_marks"

    method: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    lane: Mapped[Lane]
    reason: Mapped[str]
    source: Mapped[OverrideSource]
    marked_at: Mapped[datetime]


class PluginStateRow(Base):
    """An operator's decision whether a plugin is enabled; a plugin without a row is."""

    __tablename__ = "plugin_states"

    plugin_key: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    is_enabled: Mapped[bool]
    #: Number of decisions.
    revision: Mapped[int]
    #: The newest revision for which the plugin's ``on_enabled`` or ``on_disabled`` hooks ran; 0: none.
    announced_revision: Mapped[int] = mapped_column(default=0)
    changed_at: Mapped[datetime]


class OpenAIResponseRow(Base):
    """A response of the OpenAI-compatible API; its content follows from the events of its turn."""

    __tablename__ = "openai_responses"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: The key that created it; None on a gateway without keys.
    key_id: Mapped[str | None]
    chat_key: Mapped[str] = mapped_column(KeyText())
    #: None: the message was blocked, or starts no turn.
    turn_id: Mapped[str | None]
    previous_id: Mapped[str | None]
    model: Mapped[str]
    is_background: Mapped[bool]
    #: What the client stated: ``metadata``, ``instructions`` and the like, which the answer repeats.
    stated: Mapped[dict[str, Any]] = mapped_column(JsonText())
    created_at: Mapped[datetime] = mapped_column(index=True)


class LeaseRow(LeaseColumns, Base):
    """A named lease: one owner in the fleet for as long as it renews."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(KeyText(), primary_key=True)


class DownloadRow(LeaseColumns, Base):
    """The newest download to a file, with its lease."""

    __tablename__ = "downloads"

    #: SHA-256 of ``target``, which may be longer than an index entry.
    digest: Mapped[bytes] = mapped_column(primary_key=True)
    target: Mapped[str]
    #: The parameters that determine the outcome; callers with the same request share the download.
    request: Mapped[str]
    done_bytes: Mapped[int] = mapped_column(BigInteger(), default=0)
    whole_bytes: Mapped[int | None] = mapped_column(BigInteger())
    report: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    updated_at: Mapped[datetime] = mapped_column(index=True)


class UploadAreaRow(Base):
    """The directory behind a chat's ``/app/uploads``; a row never changes."""

    __tablename__ = "upload_areas"

    #: ``layout.encode_key`` of the chat key, which always fits into an index entry.
    chat_name: Mapped[str] = mapped_column(primary_key=True)
    directory: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class AdapterClientRow(LeaseColumns, Base):
    """A program that connects chats of an adapter; its lease is held by the gateway that streams to it."""

    __tablename__ = "adapter_clients"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    adapter_key: Mapped[str]
    platform: Mapped[str]
    name: Mapped[str]
    version: Mapped[str]
    created_at: Mapped[datetime]
    seen_at: Mapped[datetime] = mapped_column(index=True)


class AdapterSubscriptionRow(Base):
    """A channel of which a client receives what the agent sends."""

    __tablename__ = "adapter_subscriptions"

    client_id: Mapped[str] = mapped_column(
        KeyText(), ForeignKey("adapter_clients.id", ondelete="CASCADE"), primary_key=True
    )
    channel_id: Mapped[str] = mapped_column(KeyText(), primary_key=True)


class AdapterSendRow(Base):
    """A request to a client of an adapter: a message of the agent, or a question."""

    __tablename__ = "adapter_sends"

    sequence: Mapped[int] = _sequence()
    #: Also the request's id in the protocol.
    id: Mapped[str] = mapped_column(KeyText(), unique=True)
    adapter_key: Mapped[str]
    channel_id: Mapped[str] = mapped_column(KeyText())
    #: The protocol's name of the request.
    event: Mapped[str]
    #: The message to send; None for questions.
    message_id: Mapped[str | None]
    #: The question; None for messages.
    data: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    state: Mapped[SendState]
    attempt: Mapped[int] = mapped_column(default=0)
    #: The client that received it last, and the fencing token of its connection.
    client_id: Mapped[str | None]
    client_fence: Mapped[int | None] = mapped_column(BigInteger())
    #: When it is sent again unless it is answered.
    due_at: Mapped[datetime]
    #: A question is not asked after this time; None for messages.
    expires_at: Mapped[datetime | None]
    answer: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    error: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None] = mapped_column(index=True)

    __table_args__ = (
        Index(
            "ix_adapter_sends_open",
            "channel_id",
            "sequence",
            postgresql_where=text("state IN ('waiting', 'sent')"),
            sqlite_where=text("state IN ('waiting', 'sent')"),
        ),
        _ORDERED,
    )


class WebhookRow(Base):
    """A subscription of a URL to events of chats."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    url: Mapped[str]
    description: Mapped[str]
    #: Patterns of event types, as of ``fnmatch``.
    events: Mapped[list[str]] = mapped_column(JsonText())
    #: Pattern of chat keys.
    chats: Mapped[str]
    #: Counts changes of the secret, which follows from it and the signing key.
    secret_version: Mapped[int]
    is_active: Mapped[bool]
    #: Why it was deactivated; None if an operator did, or if it is active.
    fault: Mapped[str | None]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class WebhookCursorRow(Base):
    """Up to which event of a chat a webhook has its deliveries."""

    __tablename__ = "webhook_cursors"

    webhook_id: Mapped[str] = mapped_column(
        KeyText(), ForeignKey("webhooks.id", ondelete="CASCADE"), primary_key=True
    )
    chat_key: Mapped[str] = mapped_column(
        KeyText(), ForeignKey("chats.chat_key", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(BigInteger())


class WebhookDeliveryRow(Base):
    """One event that is to be delivered to the URL of a webhook."""

    __tablename__ = "webhook_deliveries"

    #: The webhook id of Standard Webhooks: the same in every attempt.
    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(KeyText(), ForeignKey("webhooks.id", ondelete="CASCADE"))
    chat_key: Mapped[str]
    number: Mapped[int] = mapped_column(BigInteger())
    type: Mapped[str]
    #: The body, as it is signed and sent.
    body: Mapped[str]
    state: Mapped[DeliveryState]
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[datetime]
    #: HTTP status of the last answer; None without one.
    status: Mapped[int | None]
    error: Mapped[str | None]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None] = mapped_column(index=True)

    __table_args__ = (
        Index("ix_webhook_deliveries_webhook_id_created_at", "webhook_id", "created_at"),
        Index(
            "ix_webhook_deliveries_open",
            "due_at",
            postgresql_where=text("state = 'waiting'"),
            sqlite_where=text("state = 'waiting'"),
        ),
    )


class McpServerRow(Base):
    """An MCP server: its declaration, and its tools as they were listed last, so that all workers agree."""

    __tablename__ = "mcp_servers"

    name: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: As in ``mcp.json``; None if only files of workers declare it.
    declaration: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    is_enabled: Mapped[bool]
    #: Identifies the declaration that was used for the listing or failed; None before the first attempt.
    listed_digest: Mapped[str | None]
    #: JSON of ``nekro.extensions.mcp.client.tools.ListedTool``s; None before the first listing.
    tools: Mapped[str | None] = mapped_column(FaithfulText())
    #: What the server says about itself: name, version, protocol, instructions.
    about: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    #: When it was listed last, with whatever result.
    listed_at: Mapped[datetime | None]
    #: Why the last attempt failed; None if it did not.
    error: Mapped[str | None] = mapped_column(FaithfulText())
    #: Counts changes of the columns above, except of ``listed_at``.
    revision: Mapped[int]
    updated_at: Mapped[datetime]
    #: Day (ISO date, UTC) of ``sampled_tokens``. Both are written by workers of earlier releases only; since
    #: revision 0017 ``SpendingTotalRow`` has what a server used.
    sampled_on: Mapped[str | None]
    sampled_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")


class WorkerRow(LeaseColumns, Base):
    """A worker process, which serves the plugins of its ``WorkerPluginRow``s while it renews its lease.

    A worker that stops releases its lease. The rows of workers without a lease are deleted when another
    worker publishes, so those of the last workers stay: they are the last published catalogue.
    """

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: Celery's ``<name>@<host>``, or role, host and process id.
    name: Mapped[str]
    lane: Mapped[str]
    host: Mapped[str]
    pid: Mapped[int]
    started_at: Mapped[datetime]
    #: Version of this package that it runs; None: one before there was this column.
    release: Mapped[str | None]


class WorkerSiteRow(Base):
    """Where a worker serves the HTTP routes and pages of a plugin; deleted with its worker."""

    __tablename__ = "worker_sites"

    worker_id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    plugin_key: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: ``host:port``.
    address: Mapped[str]


class WorkerTimerRow(Base):
    """A timer with a callback, which exists in the memory of a worker; deleted with its worker."""

    __tablename__ = "worker_timers"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    worker_id: Mapped[str] = mapped_column(KeyText(), index=True)
    #: The plugin whose code set it; "" for other code.
    plugin_key: Mapped[str]
    #: No foreign key: plugins name chats here that do not exist.
    chat_key: Mapped[str]
    fire_at: Mapped[datetime]
    description: Mapped[str]
    temporary: Mapped[bool]


class PluginSnapshotRow(Base):
    """What workers serve of one version of a plugin; a row never changes."""

    __tablename__ = "plugin_snapshots"

    #: SHA-256 of ``entry``, in hexadecimal.
    digest: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    plugin_key: Mapped[str]
    #: JSON of ``nekro.plugins.entries.PluginEntry``.
    entry: Mapped[str]
    #: When a worker served it first.
    published_at: Mapped[datetime]


class WorkerPluginRow(Base):
    """A plugin that a worker serves; deleted with its worker."""

    __tablename__ = "worker_plugins"

    worker_id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: Position in the order in which the worker loaded its plugins.
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(KeyText(), index=True)


class ApiKeyRow(Base):
    """A key of the HTTP API; rows are never deleted, so a revoked key stays one."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    name: Mapped[str]
    #: SHA-256 of the secret, which has 256 random bits.
    digest: Mapped[bytes]
    scopes: Mapped[list[str]] = mapped_column(JsonText())
    #: Pattern of the chat keys, as of ``fnmatch``.
    chats: Mapped[str]
    #: The only user for whom it acts; None: each request names one.
    user_id: Mapped[str | None]
    #: None: as the settings say; 0: no limit.
    requests_per_minute: Mapped[int | None]
    #: Limits per day (UTC) of the turns that it starts; None: no limit.
    cost_per_day: Mapped[float | None]
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger())
    #: What it keeps stored; ``KeyStorageRow`` says of what that consists.
    stored_bytes: Mapped[int] = mapped_column(BigInteger(), server_default=text("0"), default=0)
    #: Limit of that; None: as the settings say; 0: no limit.
    stored_bytes_limit: Mapped[int | None] = mapped_column(BigInteger())
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class KeyTurnRow(Base):
    """A turn, run, call, timer or job that a key pays for."""

    __tablename__ = "key_turns"

    turn_id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    key_id: Mapped[str] = mapped_column(KeyText())
    created_at: Mapped[datetime] = mapped_column(index=True)

    __table_args__ = (Index("ix_key_turns_key_id_created_at", "key_id", "created_at"),)


class KeyStorageRow(Base):
    """What a key keeps stored: of one kind and day, or one file or declaration."""

    __tablename__ = "key_storage"

    #: ``kind:key:date`` (UTC), ``kind:…`` of a file or declaration, or of a reservation.
    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    key_id: Mapped[str]
    kind: Mapped[StoredKind]
    bytes: Mapped[int] = mapped_column(BigInteger())
    created_at: Mapped[datetime]

    __table_args__ = (Index("ix_key_storage_kind", "kind", "created_at"),)


class SpendingRow(Base):
    """What one attempt at a round, one request of a plugin to a model or one run of code used.

    It is written before the model is asked, with an estimate, which stays if the worker dies.
    """

    __tablename__ = "spendings"

    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: 0, and one more for each further model that was asked for the same answer.
    part: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    #: Date (UTC) to which it is charged.
    day: Mapped[str] = mapped_column(KeyText(), index=True)
    #: Names of chat, user, key and so on are not references: what was spent stays when they go.
    chat_key: Mapped[str | None]
    #: ``adapter:user``, as of ``storage.access.spendings.user_scope``.
    user_id: Mapped[str | None]
    key_id: Mapped[str | None]
    turn_id: Mapped[str | None] = mapped_column(KeyText())
    plugin_key: Mapped[str | None]
    model_group: Mapped[str]
    model: Mapped[str]
    rounds: Mapped[int]
    #: Requests that were sent to the model; 0 while it is an estimate.
    requests: Mapped[int]
    #: Requests whose tokens and cost are an estimate, because the endpoint reported no possible number of
    #: tokens; 1 while the whole entry is an estimate.
    estimated_requests: Mapped[int] = mapped_column(server_default=text("0"), default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger())
    completion_tokens: Mapped[int] = mapped_column(BigInteger())
    cost: Mapped[float]
    sandbox_seconds: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(index=True)
    #: None: the figures are the estimate.
    settled_at: Mapped[datetime | None]


class SpendingTotalRow(Base):
    """What one scope used in one period, estimates of running work included."""

    __tablename__ = "spending_totals"

    #: ``storage.states.BudgetScope``.
    scope: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: Date (UTC); "" for a turn.
    period: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    #: Of the chat, user, key, plugin or turn; "" for the whole system.
    id: Mapped[str] = mapped_column(KeyText(), primary_key=True)
    tokens: Mapped[int] = mapped_column(BigInteger())
    cost: Mapped[float]
    rounds: Mapped[int] = mapped_column(BigInteger())
    sandbox_seconds: Mapped[float]
    #: As in ``spendings``.
    estimated_requests: Mapped[int] = mapped_column(BigInteger(), server_default=text("0"), default=0)
    #: Measures of which a chat was warned, comma-separated.
    warned: Mapped[str]
    updated_at: Mapped[datetime] = mapped_column(index=True)


class RequestRow(Base):
    """A request with an idempotency key: running under a lease, or with its answer."""

    __tablename__ = "idempotent_requests"

    #: SHA-256 of key id, method, path and idempotency key.
    digest: Mapped[bytes] = mapped_column(primary_key=True)
    #: SHA-256 of the body.
    body_digest: Mapped[bytes]
    #: The gateway that runs it renews the lease; when it is over, that gateway has died.
    lease_until: Mapped[datetime | None]
    #: Executions so far; the number of one is its fencing token.
    fence: Mapped[int] = mapped_column(BigInteger())
    #: The HTTP status; None while it runs.
    status: Mapped[int | None]
    answer: Mapped[Any | None] = mapped_column(JsonText())
    created_at: Mapped[datetime] = mapped_column(index=True)


class AuditRow(Base):
    """An administrative act over the API or by `nekro keys`."""

    __tablename__ = "audit"

    sequence: Mapped[int] = _sequence()
    at: Mapped[datetime] = mapped_column(index=True)
    #: The key; None: a gateway without keys, or a command.
    key_id: Mapped[str | None]
    #: ``key.create``, ``plugin.configure``, …
    action: Mapped[str]
    #: What it was done to.
    subject: Mapped[str]
    data: Mapped[dict[str, Any] | None] = mapped_column(JsonText())
    request_id: Mapped[str | None]

    __table_args__ = (_ORDERED,)
