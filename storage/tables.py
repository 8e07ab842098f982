"""The tables of the database.

Rows of a chat are ordered by ``sequence``. A transaction locks the chat's row before it adds
one (``ChatRepository.lock``), so within a chat a larger sequence was committed later. A column that a record
returns is explained there; a comment here explains the other columns.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    TextClause,
    event,
    false,
    text,
    true,
)
from sqlalchemy.util import OrderedSet

from nekro_agent.methods import Lane, SandboxMethodType
from nekro_agent.ports import MessageKind, WorkdayMode
from storage.sql import FaithfulText, JsonText, KeyText, StateText, UtcDateTime
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
    WaitKind,
)

__all__ = [
    "ADAPTER_CLIENTS",
    "ADAPTER_SENDS",
    "ADAPTER_SUBSCRIPTIONS",
    "API_KEYS",
    "APPROVALS",
    "AUDIT",
    "CALLS",
    "CHATS",
    "CHAT_EVENTS",
    "CHAT_SUMMARIES",
    "CRON_JOBS",
    "DOWNLOADS",
    "FILE_AREAS",
    "FILE_CONTENTS",
    "FILE_ENTRIES",
    "FILE_PARTS",
    "IDEMPOTENT_REQUESTS",
    "JOBS",
    "JOB_LOG",
    "JOB_SIGNALS",
    "KEY_STORAGE",
    "KEY_TURNS",
    "LANE_OVERRIDES",
    "LEASES",
    "MCP_SERVERS",
    "MESSAGES",
    "OPENAI_RESPONSES",
    "PARKED_PROGRAMS",
    "PLUGIN_SNAPSHOTS",
    "PLUGIN_STATES",
    "PLUGIN_VALUES",
    "PRESETS",
    "ROUNDS",
    "ROUND_PROMPTS",
    "SPENDINGS",
    "SPENDING_TOTALS",
    "TIMERS",
    "TURN_TERMS",
    "TURN_VARIABLES",
    "UPLOAD_AREAS",
    "USERS",
    "WEBHOOKS",
    "WEBHOOK_CURSORS",
    "WEBHOOK_DELIVERIES",
    "WORKERS",
    "WORKER_PLUGINS",
    "WORKER_SITES",
    "WORKER_TIMERS",
    "metadata",
]

metadata: Final = MetaData(
    # Names of constraints are fixed so that migrations can change them.
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)

_SEQUENCE: Final = BigInteger().with_variant(Integer, "sqlite")
#: SQLite: never reuse a sequence number after the newest row was deleted.
_ORDERED: Final[dict[str, Any]] = {"sqlite_autoincrement": True}


def _sequence(name: str = "sequence") -> Column[int]:
    return Column(name, _SEQUENCE, Identity(), primary_key=True)


def _chat_key(**options: Any) -> Column[str]:
    return Column("chat_key", KeyText(), ForeignKey("chats.chat_key", ondelete="CASCADE"), **options)


def _leases() -> tuple[Column[Any], ...]:
    """Columns of a lease: holder, expiry and fencing token, which each acquisition increments."""
    return (
        Column("owner", FaithfulText()),
        Column("lease_until", UtcDateTime()),
        Column("fence", BigInteger(), nullable=False, default=0),
    )


#: Names of the indexes that ``_index`` declared, in the order of this module.
_declared: Final[list[str]] = []


def _index(name: str, *columns: str | TextClause, **options: Any) -> Index:
    """Declare an index of several columns, of some rows, or of unique values."""
    _declared.append(name)
    return Index(name, *columns, **options)


def _where(condition: str) -> dict[str, Any]:
    """The condition of a partial index."""
    return {"info": {_CONDITION: text(condition)}}


#: Where an index keeps its condition until it is created. As the keyword of a database it would let
#: SQLAlchemy import that database's dialect, 30 ms of each process for PostgreSQL.
_CONDITION: Final = "condition"


@event.listens_for(metadata, "before_create")
def _set_conditions(target: MetaData, connection: Connection, **_: object) -> None:
    for index in (index for table in target.tables.values() for index in table.indexes):
        if _CONDITION in index.info:
            index.dialect_options[connection.dialect.name]["where"] = index.info[_CONDITION]


#: One value of ``plugin.store``.
PLUGIN_VALUES: Final = Table(
    "plugin_values",
    metadata,
    # SHA-256 of the four keys, which may be longer than an index entry.
    Column("digest", LargeBinary(), primary_key=True),
    Column("plugin_key", KeyText(), nullable=False, index=True),
    Column("chat_key", FaithfulText(), nullable=False),
    Column("user_key", FaithfulText(), nullable=False),
    Column("store_key", FaithfulText(), nullable=False),
    Column("value", FaithfulText(), nullable=False),
    # 1 when created, incremented by each ``set``; lets one statement distinguish the two.
    Column("revision", BigInteger(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False),
)

#: A chat, with the lease of the worker that runs its rounds and its sandbox area.
CHATS: Final = Table(
    "chats",
    metadata,
    Column("chat_key", KeyText(), primary_key=True),
    Column("container_key", KeyText(), nullable=False, unique=True),
    Column("adapter_key", FaithfulText()),
    Column("channel_id", FaithfulText()),
    Column("channel_name", FaithfulText()),
    Column("channel_type", FaithfulText()),
    # The title that was given over the API; None: it follows from the channel's name or the first message.
    Column("title", FaithfulText()),
    Column("created_at", UtcDateTime(), nullable=False),
    # The last message before a reset; the LLM sees newer ones only.
    Column("history_after", BigInteger(), nullable=False, default=0),
    # When the chat was last reset.
    Column("reset_at", UtcDateTime()),
    # The agent's persona in this chat; None means that of the settings.
    Column("preset_id", BigInteger()),
    Column("is_active", Boolean(), nullable=False, server_default=true(), default=True),
    Column("observe_mode", Boolean(), nullable=False, server_default=false(), default=False),
    Column("model_group", FaithfulText()),
    Column("history_revision", BigInteger(), nullable=False, server_default=text("0"), default=0),
    # Number of the chat's newest event.
    Column("last_event", BigInteger(), nullable=False, server_default=text("0"), default=0),
    # When the newest event was added; None: before there was this column.
    Column("active_at", UtcDateTime()),
    # Unused: the sandbox goes by the directory's times. Kept while older releases may run.
    Column("shared_used_at", UtcDateTime(), index=True),
    *_leases(),
)

#: A message of a chat's history.
MESSAGES: Final = Table(
    "messages",
    metadata,
    _sequence(),
    Column("id", KeyText(), nullable=False, unique=True),
    _chat_key(nullable=False),
    Column("kind", StateText(MessageKind), nullable=False),
    Column("sender_id", FaithfulText()),
    Column("sender_name", FaithfulText()),
    Column("text", FaithfulText(), nullable=False),
    Column("data", JsonText()),
    Column("call_id", KeyText()),
    Column("round_id", FaithfulText()),
    # The turn that it started or that sent it; None for a message of no turn, and of releases before 0.2.
    Column("turn_id", KeyText(), index=True),
    Column("plugin_key", FaithfulText()),
    # Deduplication key, such as ``observation:<call id>``.
    Column("once_key", KeyText(), unique=True),
    # SHA-256 of what a repetition with this key must repeat; None: it is not compared.
    Column("once_digest", LargeBinary()),
    Column("created_at", UtcDateTime(), nullable=False, index=True),
    _index("ix_messages_chat_key_sequence", "chat_key", "sequence"),
    **_ORDERED,
)

#: Something that happened in a chat, for readers of its stream.
#:
#: There is no foreign key to the chat: the number comes from the chat's row, so the row exists.
CHAT_EVENTS: Final = Table(
    "chat_events",
    metadata,
    Column("chat_key", KeyText(), primary_key=True),
    Column("number", BigInteger(), primary_key=True, autoincrement=False),
    Column("type", FaithfulText(), nullable=False),
    Column("turn_id", KeyText(), index=True),
    Column("round_id", FaithfulText()),
    Column("call_id", FaithfulText()),
    Column("message_id", FaithfulText()),
    Column("data", JsonText(), nullable=False),
    # When it happened, by the shared clock; not in the order of numbers.
    Column("created_at", UtcDateTime(), nullable=False, index=True),
)

#: A person who has written in a chat of an adapter; ``""`` is the adapter of chats without one.
USERS: Final = Table(
    "users",
    metadata,
    _sequence("id"),
    Column("adapter_key", KeyText(), nullable=False),
    Column("platform_userid", KeyText(), nullable=False),
    Column("username", FaithfulText(), nullable=False),
    Column("perm_level", Integer(), nullable=False, default=0),
    Column("ban_until", UtcDateTime()),
    Column("prevent_trigger_until", UtcDateTime()),
    Column("ext_data", JsonText()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False),
    _index("uq_users_platform_userid_adapter_key", "platform_userid", "adapter_key", unique=True),
    **_ORDERED,
)

#: A summary of the older messages of a chat; a message that it covers and that changes deletes it.
CHAT_SUMMARIES: Final = Table(
    "chat_summaries",
    metadata,
    _chat_key(primary_key=True),
    Column("version", Integer(), primary_key=True, autoincrement=False),
    Column("up_to", BigInteger(), nullable=False),
    Column("oldest_at", UtcDateTime(), nullable=False, index=True),
    Column("newest_at", UtcDateTime(), nullable=False),
    Column("text", FaithfulText(), nullable=False),
    Column("group_name", FaithfulText(), nullable=False),
    Column("model", FaithfulText(), nullable=False),
    Column("prompt_tokens", Integer()),
    Column("answer_tokens", Integer()),
    Column("tokens_estimated", Boolean(), nullable=False, server_default=false(), default=False),
    Column("cost", Double(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False),
)

#: Variables of the programs of an open turn, for its next program.
TURN_VARIABLES: Final = Table(
    "turn_variables",
    metadata,
    Column("turn_id", KeyText(), primary_key=True),
    _chat_key(nullable=False),
    Column("round_id", FaithfulText(), nullable=False),
    # Tagged text of each variable by its name; only a sandbox reads it.
    Column("kept", JsonText(), nullable=False),
    Column("not_kept", JsonText(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False, index=True),
    _index("ix_turn_variables_chat_key", "chat_key"),
)

#: A stored persona.
PRESETS: Final = Table(
    "presets",
    metadata,
    _sequence("id"),
    Column("name", FaithfulText(), nullable=False),
    Column("title", FaithfulText(), nullable=False, default=""),
    Column("avatar", FaithfulText(), nullable=False, default=""),
    Column("content", FaithfulText(), nullable=False, default=""),
    Column("description", FaithfulText(), nullable=False, default=""),
    Column("tags", FaithfulText(), nullable=False, default=""),
    Column("author", FaithfulText(), nullable=False, default=""),
    Column("remote_id", FaithfulText()),
    Column("on_shared", Boolean(), nullable=False, default=False),
    Column("ext_data", JsonText()),
    # Identifies the effect of a call (``nekro_agent.execution.current``), which may be repeated.
    Column("once_key", KeyText()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False),
    _index("uq_presets_once_key", "once_key", unique=True),
    **_ORDERED,
)

#: A call that must have at most one effect, or must not be lost.
#:
#: There is no foreign key to the chat, because every claim would have to check it.
CALLS: Final = Table(
    "calls",
    metadata,
    Column("id", KeyText(), primary_key=True),
    Column("method", FaithfulText(), nullable=False),
    Column("type", StateText(SandboxMethodType), nullable=False),
    Column("chat_key", KeyText(), nullable=False),
    Column("round_id", KeyText(), index=True),
    Column("lane", FaithfulText()),
    Column("state", StateText(CallState), nullable=False),
    Column("repeatable", Boolean(), nullable=False),
    # Claims so far; a claim's number is its fencing token.
    Column("fence", BigInteger(), nullable=False, default=0),
    Column("worker", FaithfulText()),
    Column("lease_until", UtcDateTime()),
    Column("requested_at", UtcDateTime(), nullable=False),
    # When the message was last published to the broker.
    Column("published_at", UtcDateTime()),
    Column("deadline", UtcDateTime()),
    Column("detached_at", UtcDateTime()),
    Column("started_at", UtcDateTime()),
    Column("finished_at", UtcDateTime()),
    # The message's body, for publishing it again; None for calls that are not published again.
    Column("invocation", JsonText()),
    # What its program read before it; None: nothing, or a call of no program.
    Column("readings", FaithfulText()),
    Column("outcome", JsonText()),
    Column("error_type", FaithfulText()),
    Column("error_message", FaithfulText()),
    _index("ix_calls_open", "requested_at", **_where("state IN ('queued', 'running')")),
    _index("ix_calls_finished_at", "finished_at"),
)

#: A request for approval of one call, and the decision on it.
APPROVALS: Final = Table(
    "approvals",
    metadata,
    _sequence(),
    Column("id", KeyText(), nullable=False, unique=True),
    Column("call_id", KeyText(), nullable=False, unique=True),
    _chat_key(nullable=False),
    # Turn and round of the call; None outside rounds.
    Column("turn_id", FaithfulText()),
    Column("round_id", FaithfulText()),
    # The turn that began the work: its approved calls begin further turns, which share its grants.
    Column("root_turn_id", KeyText(), index=True),
    Column("user_id", FaithfulText()),
    Column("method", KeyText(), nullable=False),
    Column("lane", FaithfulText(), nullable=False),
    # Tagged text, as the caller wrote it.
    Column("arguments", FaithfulText(), nullable=False),
    # Tagged text that runs instead; None: the approver changed nothing.
    Column("edited_arguments", FaithfulText()),
    # SHA-256 of the method and the arguments that run, in hexadecimal.
    Column("digest", FaithfulText(), nullable=False),
    Column("requested_at", UtcDateTime(), nullable=False),
    Column("expires_at", UtcDateTime(), nullable=False),
    Column("state", StateText(ApprovalState), nullable=False),
    Column("scope", StateText(ApprovalScope)),
    # Until when an approval of scope TURN or CHAT permits further calls.
    Column("grant_until", UtcDateTime()),
    Column("revoked_at", UtcDateTime()),
    Column("decided_by", FaithfulText()),
    Column("decided_at", UtcDateTime(), index=True),
    Column("reason", FaithfulText()),
    # Signature of an approval, without which the row permits nothing.
    Column("seal", FaithfulText()),
    _index("ix_approvals_pending", "expires_at", **_where("state = 'pending'")),
    _index(
        "ix_approvals_granted",
        "chat_key",
        "method",
        **_where("state = 'approved' AND scope IN ('turn', 'chat')"),
    ),
    _index("ix_approvals_chat_key_sequence", "chat_key", "sequence"),
    **_ORDERED,
)

#: SQL: on whose behalf a round waits: the key that pays for it, or else its chat.
_ROUND_OWNER: Final = "coalesce(nullif(key_id, ''), chat_key)"
_WAITS: Final = "state IN ('requested')"

#: One round of the LLM: its trigger, its progress and its outcome.
ROUNDS: Final = Table(
    "rounds",
    metadata,
    _sequence(),
    Column("id", KeyText(), nullable=False, unique=True),
    _chat_key(nullable=False),
    Column("turn_id", KeyText(), nullable=False, index=True),
    # The turn whose work caused the turn; both are in one trace.
    Column("root_turn_id", KeyText()),
    Column("number", Integer(), nullable=False),
    Column("trigger_kind", StateText(TriggerKind), nullable=False),
    Column("trigger_id", KeyText(), nullable=False),
    Column("state", StateText(RoundState), nullable=False),
    Column("attempt", Integer(), nullable=False, default=0),
    Column("fence", BigInteger(), nullable=False, default=0),
    Column("worker", FaithfulText()),
    Column("merged_into", KeyText(), index=True),
    Column("requested_at", UtcDateTime(), nullable=False),
    Column("not_before", UtcDateTime(), nullable=False),
    Column("started_at", UtcDateTime()),
    Column("finished_at", UtcDateTime(), index=True),
    Column("cancel_requested_at", UtcDateTime()),
    Column("user_id", FaithfulText()),
    Column("observation", FaithfulText()),
    Column("segments", JsonText()),
    Column("key_id", KeyText()),
    # Order in which waiting rounds start (``storage.repositories.rounds``); 0.2.0 writes none.
    Column("fair_position", BigInteger(), nullable=False, server_default="0"),
    Column("prompt_chars", Integer()),
    Column("model", FaithfulText()),
    Column("answer", FaithfulText()),
    Column("answered_at", UtcDateTime()),
    Column("code", FaithfulText()),
    Column("stop_type", Integer()),
    Column("exit_code", Integer()),
    Column("output", FaithfulText()),
    Column("prompt_tokens", Integer()),
    Column("completion_tokens", Integer()),
    Column("tokens_estimated", Boolean()),
    Column("cost", Double()),
    Column("calls", JsonText()),
    Column("error", FaithfulText()),
    # Why its program cannot be run again after its worker died; empty: it can, None: nothing is known.
    Column("not_resumable", FaithfulText()),
    # What its program has read of clocks, for replays; None: nothing.
    Column("readings", FaithfulText()),
    # The round whose program this one goes on with; None: it asks the model.
    Column("program_id", KeyText(), index=True),
    # Of a turn's first round, when the turn has ended: the state of its event ``turn.ended``.
    Column("turn_state", FaithfulText()),
    # Of a turn's first round, when the turn has ended: the sum of its rounds.
    Column("turn_cost", Double()),
    # Lists of turns: first rounds, the newest first, with what filters read.
    _index("ix_rounds_turns", "requested_at", "sequence", "chat_key", "turn_cost", **_where("id = turn_id")),
    _index("ix_rounds_turn_state", "turn_state", "requested_at", "sequence", **_where("id = turn_id")),
    _index("uq_rounds_trigger_kind_trigger_id", "trigger_kind", "trigger_id", unique=True),
    # Only statements that state these conditions, which are always true, may use the two: a plan that was
    # made while few rounds waited would read all of them in a flood.
    _index("ix_rounds_fair", "fair_position", "sequence", **_where(f"{_WAITS} AND fair_position >= 0")),
    _index(
        "ix_rounds_fair_owner",
        text(_ROUND_OWNER),
        "fair_position",
        **_where(f"{_WAITS} AND fair_position > -1"),
    ),
    _index("ix_rounds_chat_key_sequence", "chat_key", "sequence"),
    # The database itself enforces at most one running round per chat.
    _index("uq_rounds_running", "chat_key", unique=True, **_where("state = 'running'")),
    _index("ix_rounds_open", "chat_key", "not_before", **_where("state IN ('requested', 'running')")),
    **_ORDERED,
)

#: What a program waits for, and what it needs to be run again then.
PARKED_PROGRAMS: Final = Table(
    "parked_programs",
    metadata,
    Column("call_id", KeyText(), primary_key=True),
    Column("program_id", KeyText(), ForeignKey("rounds.id", ondelete="CASCADE"), nullable=False, index=True),
    _chat_key(nullable=False),
    Column("turn_id", KeyText()),
    Column("kind", StateText(WaitKind), nullable=False),
    # The id of the job, or the person who may answer; None: everyone of the chat.
    Column("subject", KeyText()),
    # The question and its choices as JSON.
    Column("about", JsonText()),
    # When the wait ends, at the latest; None: it has ended.
    Column("until", UtcDateTime()),
    Column("answers", JsonText(), nullable=False),
    Column("notes", JsonText(), nullable=False),
    Column("kept", JsonText()),
    Column("not_kept", JsonText()),
    Column("parked_at", UtcDateTime(), nullable=False),
    _index("ix_parked_programs_open", "chat_key", **_where("until IS NOT NULL")),
    _index("ix_parked_programs_until", "until", **_where("until IS NOT NULL")),
)

#: What the newest request of a round sent to the model (``NEKRO_AGENT__KEEP_PROMPTS``).
ROUND_PROMPTS: Final = Table(
    "round_prompts",
    metadata,
    Column("round_id", KeyText(), ForeignKey("rounds.id", ondelete="CASCADE"), primary_key=True),
    # Messages as JSON, without secrets and without the data of images; long texts are cut.
    Column("prompt", FaithfulText(), nullable=False),
    Column("sent_at", UtcDateTime(), nullable=False, index=True),
)

#: A search term of turns: a model that answered, or a plugin that was called.
TURN_TERMS: Final = Table(
    "turn_terms",
    metadata,
    Column(
        "sequence",
        _SEQUENCE,
        ForeignKey("rounds.sequence", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    # See ``storage.listings.chats``.
    Column("term", KeyText(), primary_key=True),
    # When the turn was requested.
    Column("requested_at", UtcDateTime(), nullable=False),
    _index("ix_turn_terms_term", "term", "requested_at", "sequence"),
)

#: A one-time timer of a chat.
TIMERS: Final = Table(
    "timers",
    metadata,
    Column("id", KeyText(), primary_key=True),
    _chat_key(nullable=False, index=True),
    Column("fire_at", UtcDateTime(), nullable=False),
    Column("description", FaithfulText(), nullable=False),
    Column("temporary", Boolean(), nullable=False),
    Column("state", StateText(TimerState), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False),
    _index("ix_timers_state_fire_at", "state", "fire_at"),
)

#: A recurring timer of a chat.
CRON_JOBS: Final = Table(
    "cron_jobs",
    metadata,
    Column("job_id", KeyText(), primary_key=True),
    _chat_key(nullable=False, index=True),
    Column("cron_expr", FaithfulText(), nullable=False),
    Column("timezone", FaithfulText(), nullable=False),
    Column("workday_mode", StateText(WorkdayMode), nullable=False),
    Column("title", FaithfulText()),
    Column("event_desc", FaithfulText(), nullable=False),
    Column("next_fire_at", UtcDateTime(), index=True),
    Column("last_fired_at", UtcDateTime()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False),
)

#: A background job of a plugin.
JOBS: Final = Table(
    "jobs",
    metadata,
    Column("id", KeyText(), primary_key=True),
    Column("type", KeyText(), nullable=False),
    Column("task_id", KeyText(), nullable=False),
    Column("plugin_key", FaithfulText(), nullable=False),
    Column("chat_key", KeyText(), nullable=False, index=True),
    Column("call_id", FaithfulText()),
    Column("round_id", FaithfulText()),
    Column("turn_id", KeyText(), index=True),
    Column("retry_of", FaithfulText()),
    Column("state", StateText(JobState), nullable=False),
    Column("on_crash", StateText(CrashPolicy), nullable=False),
    Column("percent", Integer(), nullable=False, default=0),
    Column("message", FaithfulText(), nullable=False, default=""),
    Column("data", JsonText()),
    Column("args", JsonText()),
    Column("attempt", Integer(), nullable=False, default=0),
    Column("fence", BigInteger(), nullable=False, default=0),
    Column("worker", FaithfulText()),
    Column("lease_until", UtcDateTime()),
    Column("cancel_requested_at", UtcDateTime()),
    Column("published_at", UtcDateTime()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("started_at", UtcDateTime()),
    Column("updated_at", UtcDateTime(), nullable=False, index=True),
    Column("finished_at", UtcDateTime()),
    _index(
        "uq_jobs_open",
        "plugin_key",
        "type",
        "task_id",
        unique=True,
        **_where("state IN ('queued', 'running')"),
    ),
)

#: An entry of a background job's log; ``storage.repositories.job_log`` limits their number.
JOB_LOG: Final = Table(
    "job_log",
    metadata,
    Column("job_id", KeyText(), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    # Grows within a job.
    Column("number", Integer(), primary_key=True, autoincrement=False),
    Column("kind", StateText(JobLogKind), nullable=False),
    # The attempt during which it was added; 0: before the first.
    Column("attempt", Integer(), nullable=False),
    # Of a start.
    Column("worker", FaithfulText()),
    # Of a report.
    Column("percent", Integer()),
    Column("level", FaithfulText()),
    Column("text", FaithfulText(), nullable=False),
    Column("at", UtcDateTime(), nullable=False),
)

#: A signal to a job that it has not taken yet, or the job's wait for one.
JOB_SIGNALS: Final = Table(
    "job_signals",
    metadata,
    Column("job_id", KeyText(), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("key", KeyText(), primary_key=True),
    Column("data", JsonText()),
    Column("created_at", UtcDateTime(), nullable=False),
)

#: A lane override of a method, set by the watchdog or an operator.
LANE_OVERRIDES: Final = Table(
    "method_marks",
    metadata,
    Column("method", KeyText(), primary_key=True),
    Column("lane", StateText(Lane), nullable=False),
    Column("reason", FaithfulText(), nullable=False),
    Column("source", StateText(OverrideSource), nullable=False),
    Column("marked_at", UtcDateTime(), nullable=False),
)

#: An operator's decision whether a plugin is enabled; a plugin without a row is.
PLUGIN_STATES: Final = Table(
    "plugin_states",
    metadata,
    Column("plugin_key", KeyText(), primary_key=True),
    Column("is_enabled", Boolean(), nullable=False),
    Column("revision", Integer(), nullable=False),
    Column("announced_revision", Integer(), nullable=False, default=0),
    Column("changed_at", UtcDateTime(), nullable=False),
)

#: A response of the OpenAI-compatible API; its content follows from the events of its turn.
OPENAI_RESPONSES: Final = Table(
    "openai_responses",
    metadata,
    Column("id", KeyText(), primary_key=True),
    # The key that created it; None on a gateway without keys.
    Column("key_id", FaithfulText()),
    Column("chat_key", KeyText(), nullable=False),
    # None: the message was blocked, or starts no turn.
    Column("turn_id", FaithfulText()),
    Column("previous_id", FaithfulText()),
    Column("model", FaithfulText(), nullable=False),
    Column("is_background", Boolean(), nullable=False),
    # What the client stated: ``metadata``, ``instructions`` and the like, which the answer repeats.
    Column("stated", JsonText(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False, index=True),
)

#: A named lease: one owner in the fleet for as long as it renews.
LEASES: Final = Table(
    "leases",
    metadata,
    Column("name", KeyText(), primary_key=True),
    *_leases(),
)

#: The newest download to a file, with its lease.
DOWNLOADS: Final = Table(
    "downloads",
    metadata,
    # SHA-256 of ``target``, which may be longer than an index entry.
    Column("digest", LargeBinary(), primary_key=True),
    Column("target", FaithfulText(), nullable=False),
    # The parameters that determine the outcome; callers with the same request share the download.
    Column("request", FaithfulText(), nullable=False),
    Column("done_bytes", BigInteger(), nullable=False, default=0),
    Column("whole_bytes", BigInteger()),
    Column("report", JsonText()),
    Column("updated_at", UtcDateTime(), nullable=False, index=True),
    *_leases(),
)

#: The directory behind a chat's ``/app/uploads``; a row never changes.
UPLOAD_AREAS: Final = Table(
    "upload_areas",
    metadata,
    # ``layout.encode_key`` of the chat key, which always fits into an index entry.
    Column("chat_name", FaithfulText(), primary_key=True),
    Column("directory", FaithfulText(), nullable=False, unique=True),
    Column("created_at", UtcDateTime(), nullable=False),
)

#: A directory whose files are contents in a store; see ``storage.files``.
FILE_AREAS: Final = Table(
    "file_areas",
    metadata,
    _sequence("id"),
    # ``uploads/<chat key>``, ``shared/<container key>``, ``plugin/<plugin key>``.
    Column("name", KeyText(), nullable=False, unique=True),
    Column("version", BigInteger(), nullable=False),
    # Of the newest version: files and directories, and the bytes of the files.
    Column("names", BigInteger(), nullable=False),
    Column("bytes", BigInteger(), nullable=False),
    Column("changed_at", UtcDateTime(), nullable=False),
    **_ORDERED,
)

#: Bytes by their SHA-256. The row exists before the object does, and its id is never used again.
FILE_CONTENTS: Final = Table(
    "file_contents",
    metadata,
    _sequence("id"),
    Column("sha256", FaithfulText(), nullable=False, unique=True),
    Column("bytes", BigInteger(), nullable=False),
    # Whether the store has all of it.
    Column("is_stored", Boolean(), nullable=False),
    # What its first bytes tell; None: nothing, or it was never stored.
    Column("media_type", FaithfulText()),
    # When a host last intended to use it.
    Column("used_at", UtcDateTime(), nullable=False, index=True),
    **_ORDERED,
)

#: The parts, in order, of a content that is larger than an object.
FILE_PARTS: Final = Table(
    "file_parts",
    metadata,
    Column("content_id", _SEQUENCE, ForeignKey("file_contents.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer(), primary_key=True, autoincrement=False),
    Column("part_id", _SEQUENCE, ForeignKey("file_contents.id"), nullable=False, index=True),
)

#: What an area has at a path, from one version until another.
FILE_ENTRIES: Final = Table(
    "file_entries",
    metadata,
    Column("area_id", _SEQUENCE, ForeignKey("file_areas.id", ondelete="CASCADE"), primary_key=True),
    # ``storage.files.paths.folded_path``.
    Column("folded", FaithfulText(), primary_key=True),
    Column("since", BigInteger(), primary_key=True, autoincrement=False),
    # The first version without it; None: the newest version has it.
    Column("until", BigInteger()),
    Column("path", FaithfulText(), nullable=False),
    # ``folded`` of the directory that it is in; "": the area itself.
    Column("parent", FaithfulText(), nullable=False),
    # None: a directory.
    Column("content_id", _SEQUENCE, ForeignKey("file_contents.id"), index=True),
    Column("is_executable", Boolean(), nullable=False),
    Column("modified_ns", BigInteger(), nullable=False),
    # When the entry was added, or last used where that counts.
    Column("added_at", UtcDateTime(), nullable=False),
    Column("ended_at", UtcDateTime(), index=True),
    _index(
        "ix_file_entries_present",
        "area_id",
        "folded",
        unique=True,
        **_where("until IS NULL"),
    ),
    _index(
        "ix_file_entries_parent",
        "area_id",
        "parent",
        **_where("until IS NULL"),
    ),
    # What changed after a version.
    _index("ix_file_entries_since", "area_id", "since"),
    _index("ix_file_entries_until", "area_id", "until", **_where("until IS NOT NULL")),
)

#: A program that connects chats of an adapter; its lease is held by the gateway that streams to it.
ADAPTER_CLIENTS: Final = Table(
    "adapter_clients",
    metadata,
    Column("id", KeyText(), primary_key=True),
    Column("adapter_key", FaithfulText(), nullable=False),
    Column("platform", FaithfulText(), nullable=False),
    Column("name", FaithfulText(), nullable=False),
    Column("version", FaithfulText(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("seen_at", UtcDateTime(), nullable=False, index=True),
    *_leases(),
)

#: A subscription of a client: it receives what the agent sends to the channel.
ADAPTER_SUBSCRIPTIONS: Final = Table(
    "adapter_subscriptions",
    metadata,
    Column("client_id", KeyText(), ForeignKey("adapter_clients.id", ondelete="CASCADE"), primary_key=True),
    Column("channel_id", KeyText(), primary_key=True),
)

#: A request to a client of an adapter: a message of the agent, or a question.
ADAPTER_SENDS: Final = Table(
    "adapter_sends",
    metadata,
    _sequence(),
    # Also the request's id in the protocol.
    Column("id", KeyText(), nullable=False, unique=True),
    Column("adapter_key", FaithfulText(), nullable=False),
    Column("channel_id", KeyText(), nullable=False),
    # The protocol's name of the request.
    Column("event", FaithfulText(), nullable=False),
    # The message to send; None for questions.
    Column("message_id", FaithfulText()),
    # The question; None for messages.
    Column("data", JsonText()),
    Column("state", StateText(SendState), nullable=False),
    Column("attempt", Integer(), nullable=False, default=0),
    # The client that received it last, and the fencing token of its connection.
    Column("client_id", FaithfulText()),
    Column("client_fence", BigInteger()),
    # When it is sent again unless it is answered.
    Column("due_at", UtcDateTime(), nullable=False),
    # A question is not asked after this time; None for messages.
    Column("expires_at", UtcDateTime()),
    Column("answer", JsonText()),
    Column("error", FaithfulText()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("finished_at", UtcDateTime(), index=True),
    _index("ix_adapter_sends_open", "channel_id", "sequence", **_where("state IN ('waiting', 'sent')")),
    **_ORDERED,
)

#: A subscription of a URL to events of chats.
WEBHOOKS: Final = Table(
    "webhooks",
    metadata,
    Column("id", KeyText(), primary_key=True),
    Column("url", FaithfulText(), nullable=False),
    Column("description", FaithfulText(), nullable=False),
    Column("events", JsonText(), nullable=False),
    Column("chats", FaithfulText(), nullable=False),
    # Counts changes of the secret, which follows from it and the signing key.
    Column("secret_version", Integer(), nullable=False),
    Column("is_active", Boolean(), nullable=False),
    Column("fault", FaithfulText()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False),
)

#: The newest event of a chat that a webhook has a delivery for.
WEBHOOK_CURSORS: Final = Table(
    "webhook_cursors",
    metadata,
    Column("webhook_id", KeyText(), ForeignKey("webhooks.id", ondelete="CASCADE"), primary_key=True),
    _chat_key(primary_key=True),
    Column("number", BigInteger(), nullable=False),
)

#: One event that is to be delivered to the URL of a webhook.
WEBHOOK_DELIVERIES: Final = Table(
    "webhook_deliveries",
    metadata,
    # The webhook id of Standard Webhooks: the same in every attempt.
    Column("id", KeyText(), primary_key=True),
    Column("webhook_id", KeyText(), ForeignKey("webhooks.id", ondelete="CASCADE"), nullable=False),
    Column("chat_key", FaithfulText(), nullable=False),
    Column("number", BigInteger(), nullable=False),
    Column("type", FaithfulText(), nullable=False),
    # The body, as it is signed and sent.
    Column("body", FaithfulText(), nullable=False),
    Column("state", StateText(DeliveryState), nullable=False),
    Column("attempts", Integer(), nullable=False, default=0),
    Column("due_at", UtcDateTime(), nullable=False),
    # HTTP status of the last answer; None without one.
    Column("status", Integer()),
    Column("error", FaithfulText()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("finished_at", UtcDateTime(), index=True),
    _index("ix_webhook_deliveries_webhook_id_created_at", "webhook_id", "created_at"),
    _index("ix_webhook_deliveries_open", "due_at", **_where("state = 'waiting'")),
)

#: An MCP server: its declaration, and its tools as they were listed last, so that all workers agree.
MCP_SERVERS: Final = Table(
    "mcp_servers",
    metadata,
    Column("name", KeyText(), primary_key=True),
    # As in ``mcp.json``; None if only files of workers declare it.
    Column("declaration", JsonText()),
    Column("is_enabled", Boolean(), nullable=False),
    # Identifies the declaration that was used for the listing or failed; None before the first attempt.
    Column("listed_digest", FaithfulText()),
    # JSON of ``nekro.extensions.mcp.client.tools.ListedTool``s; None before the first listing.
    Column("tools", FaithfulText()),
    # What the server says about itself: name, version, protocol, instructions.
    Column("about", JsonText()),
    # When it was listed last, with whatever result.
    Column("listed_at", UtcDateTime()),
    # Why the last attempt failed; None if it did not.
    Column("error", FaithfulText()),
    # Counts changes of the columns above, except of ``listed_at``.
    Column("revision", Integer(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False),
    # Day (ISO date, UTC) of ``sampled_tokens``. Both are written by workers of earlier releases only; since
    # revision 0017 ``SPENDING_TOTALS`` has what a server used.
    Column("sampled_on", FaithfulText()),
    Column("sampled_tokens", BigInteger(), nullable=False, server_default="0"),
)

#: A worker process, which serves the plugins of its ``WORKER_PLUGINS``s while it renews its lease.
#:
#: A worker that stops releases its lease. The rows of workers without a lease are deleted when another
#: worker publishes, so those of the last workers stay: they are the last published catalogue.
WORKERS: Final = Table(
    "workers",
    metadata,
    Column("id", KeyText(), primary_key=True),
    # Celery's ``<name>@<host>``, or role, host and process id.
    Column("name", FaithfulText(), nullable=False),
    Column("lane", FaithfulText(), nullable=False),
    Column("host", FaithfulText(), nullable=False),
    Column("pid", Integer(), nullable=False),
    Column("started_at", UtcDateTime(), nullable=False),
    # Version of this package that it runs; None: one before there was this column.
    Column("release", FaithfulText()),
    *_leases(),
)

#: Where a worker serves the HTTP routes and pages of a plugin; deleted with its worker.
WORKER_SITES: Final = Table(
    "worker_sites",
    metadata,
    Column("worker_id", KeyText(), primary_key=True),
    Column("plugin_key", KeyText(), primary_key=True),
    Column("address", FaithfulText(), nullable=False),
)

#: A timer with a callback, which exists in the memory of a worker; deleted with its worker.
WORKER_TIMERS: Final = Table(
    "worker_timers",
    metadata,
    Column("id", KeyText(), primary_key=True),
    Column("worker_id", KeyText(), nullable=False, index=True),
    Column("plugin_key", FaithfulText(), nullable=False),
    # No foreign key: plugins name chats here that do not exist.
    Column("chat_key", FaithfulText(), nullable=False),
    Column("fire_at", UtcDateTime(), nullable=False),
    Column("description", FaithfulText(), nullable=False),
    Column("temporary", Boolean(), nullable=False),
)

#: What workers serve of one version of a plugin; a row never changes.
PLUGIN_SNAPSHOTS: Final = Table(
    "plugin_snapshots",
    metadata,
    # SHA-256 of ``entry``, in hexadecimal.
    Column("digest", KeyText(), primary_key=True),
    Column("plugin_key", FaithfulText(), nullable=False),
    Column("entry", FaithfulText(), nullable=False),
    Column("published_at", UtcDateTime(), nullable=False),
)

#: A plugin that a worker serves; deleted with its worker.
WORKER_PLUGINS: Final = Table(
    "worker_plugins",
    metadata,
    Column("worker_id", KeyText(), primary_key=True),
    Column("position", Integer(), primary_key=True, autoincrement=False),
    Column("digest", KeyText(), nullable=False, index=True),
)

#: A key of the HTTP API; rows are never deleted, so a revoked key stays one.
API_KEYS: Final = Table(
    "api_keys",
    metadata,
    Column("id", KeyText(), primary_key=True),
    Column("name", FaithfulText(), nullable=False),
    # SHA-256 of the secret, which has 256 random bits.
    Column("digest", LargeBinary(), nullable=False),
    Column("scopes", JsonText(), nullable=False),
    Column("chats", FaithfulText(), nullable=False),
    Column("user_id", FaithfulText()),
    Column("requests_per_minute", Integer()),
    Column("cost_per_day", Double()),
    Column("tokens_per_day", BigInteger()),
    # What it keeps stored; ``KEY_STORAGE`` says of what that consists.
    Column("stored_bytes", BigInteger(), nullable=False, server_default=text("0"), default=0),
    Column("stored_bytes_limit", BigInteger()),
    Column("created_at", UtcDateTime(), nullable=False),
    Column("expires_at", UtcDateTime()),
    Column("revoked_at", UtcDateTime()),
)

#: A turn, run, call, timer or job that a key pays for.
KEY_TURNS: Final = Table(
    "key_turns",
    metadata,
    Column("turn_id", KeyText(), primary_key=True),
    Column("key_id", KeyText(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False, index=True),
    _index("ix_key_turns_key_id_created_at", "key_id", "created_at"),
)

#: What a key keeps stored: of one kind and day, or one file or declaration.
KEY_STORAGE: Final = Table(
    "key_storage",
    metadata,
    # ``kind:key:date`` (UTC), ``kind:…`` of a file or declaration, or of a reservation.
    Column("id", KeyText(), primary_key=True),
    Column("key_id", FaithfulText(), nullable=False),
    Column("kind", StateText(StoredKind), nullable=False),
    Column("bytes", BigInteger(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False),
    _index("ix_key_storage_kind", "kind", "created_at"),
)

#: What one attempt at a round, one request of a plugin to a model or one run of code used.
#:
#: It is written before the model is asked, with an estimate, which stays if the worker dies.
SPENDINGS: Final = Table(
    "spendings",
    metadata,
    Column("id", KeyText(), primary_key=True),
    # 0, and one more for each further model that was asked for the same answer.
    Column("part", Integer(), primary_key=True, autoincrement=False),
    # The cost counts for this date (UTC).
    Column("day", KeyText(), nullable=False, index=True),
    # Names of chat, user, key and so on are not references: what was spent stays when they go.
    Column("chat_key", FaithfulText()),
    # ``adapter:user``; see ``storage.accounts.spendings.user_scope``.
    Column("user_id", FaithfulText()),
    Column("key_id", FaithfulText()),
    Column("turn_id", KeyText()),
    Column("plugin_key", FaithfulText()),
    Column("model_group", FaithfulText(), nullable=False),
    Column("model", FaithfulText(), nullable=False),
    Column("rounds", Integer(), nullable=False),
    # Requests that were sent to the model; 0 while it is an estimate.
    Column("requests", Integer(), nullable=False),
    # Requests whose tokens and cost are an estimate, because the endpoint reported no possible number of
    # tokens; 1 while the whole entry is an estimate.
    Column("estimated_requests", Integer(), nullable=False, server_default=text("0"), default=0),
    Column("prompt_tokens", BigInteger(), nullable=False),
    Column("completion_tokens", BigInteger(), nullable=False),
    Column("cost", Double(), nullable=False),
    Column("sandbox_seconds", Double(), nullable=False),
    Column("created_at", UtcDateTime(), nullable=False, index=True),
    # None: the figures are the estimate.
    Column("settled_at", UtcDateTime()),
)

#: What one scope used in one period, estimates of running work included.
SPENDING_TOTALS: Final = Table(
    "spending_totals",
    metadata,
    # ``storage.states.BudgetScope``.
    Column("scope", KeyText(), primary_key=True),
    Column("period", KeyText(), primary_key=True),
    # Of the chat, user, key, plugin or turn; "" for the whole system.
    Column("id", KeyText(), primary_key=True),
    Column("tokens", BigInteger(), nullable=False),
    Column("cost", Double(), nullable=False),
    Column("rounds", BigInteger(), nullable=False),
    Column("sandbox_seconds", Double(), nullable=False),
    # As in ``spendings``.
    Column("estimated_requests", BigInteger(), nullable=False, server_default=text("0"), default=0),
    Column("warned", FaithfulText(), nullable=False),
    Column("updated_at", UtcDateTime(), nullable=False, index=True),
)

#: A request with an idempotency key: running under a lease, or with its answer.
IDEMPOTENT_REQUESTS: Final = Table(
    "idempotent_requests",
    metadata,
    # SHA-256 of key id, method, path and idempotency key.
    Column("digest", LargeBinary(), primary_key=True),
    Column("body_digest", LargeBinary(), nullable=False),
    # The gateway that runs it renews the lease; when it is over, that gateway has died.
    Column("lease_until", UtcDateTime()),
    # Executions so far; the number of one is its fencing token.
    Column("fence", BigInteger(), nullable=False),
    Column("status", Integer()),
    Column("answer", JsonText()),
    Column("created_at", UtcDateTime(), nullable=False, index=True),
)

#: An administrative act over the API or by `nekro keys`.
AUDIT: Final = Table(
    "audit",
    metadata,
    _sequence(),
    Column("at", UtcDateTime(), nullable=False, index=True),
    # The key; None: a gateway without keys, or a command.
    Column("key_id", FaithfulText()),
    # ``key.create``, ``plugin.configure``, …
    Column("action", FaithfulText(), nullable=False),
    # What it was done to.
    Column("subject", FaithfulText(), nullable=False),
    Column("data", JsonText()),
    Column("request_id", FaithfulText()),
    **_ORDERED,
)


def _place(index: Index) -> tuple[int, str]:
    name = str(index.name)
    return (_declared.index(name) if name in _declared else -1, name)


# SQLAlchemy keeps a set. A new database gets the indexes of a table in this order instead: of two that serve
# a statement equally well, SQLite and PostgreSQL use the later one.
for _table in metadata.tables.values():
    _table.indexes = OrderedSet(sorted(_table.indexes, key=_place))
