"""Ids of rows and accounts, and states of rows with the final ones; repositories make the transitions."""

from __future__ import annotations

from enum import StrEnum
from typing import Final
from uuid import uuid4

from nekro_agent.ports import JobState

__all__ = [
    "FINAL_CALL_STATES",
    "FINAL_JOB_STATES",
    "FINAL_ROUND_STATES",
    "OPEN_TIMER_STATES",
    "RECURRING",
    "ApprovalScope",
    "ApprovalState",
    "BudgetScope",
    "CallState",
    "CrashPolicy",
    "DeliveryState",
    "JobLogKind",
    "JobState",
    "OverrideSource",
    "RoundState",
    "SendState",
    "TimerState",
    "TriggerKind",
    "account_of_key",
    "account_of_recurring",
    "key_of_account",
    "new_id",
]


def new_id() -> str:
    """Return a fresh id for a row: 32 hexadecimal digits."""
    return uuid4().hex


#: Begins an account that is a key. Other accounts are ids that we made, or begin with another word.
_KEY: Final = "key:"
#: Begins the account of a recurring timer, whose id a plugin may choose.
RECURRING: Final = "cron:"


def account_of_key(key_id: str) -> str:
    """Return the account of what a key does outside of turns, runs and calls."""
    return f"{_KEY}{key_id}"


def account_of_recurring(job_id: str) -> str:
    """Return the account of a recurring timer."""
    return f"{RECURRING}{job_id}"


def key_of_account(account_id: str) -> str | None:
    """Return the key that an account names; None if a row must tell it."""
    return account_id.removeprefix(_KEY) if account_id.startswith(_KEY) else None


class CallState(StrEnum):
    """State of a call of a plugin method."""

    #: Recorded, and not sent before a person approves it.
    AWAITING = "awaiting"
    #: Recorded, not claimed by a worker yet.
    QUEUED = "queued"
    #: A worker holds the claim and may be running the method.
    RUNNING = "running"
    #: The method returned; the outcome is kept for repeated deliveries.
    DONE = "done"
    #: The method raised, or its result could not be used.
    FAILED = "failed"
    #: The worker died while running the method, whose effect may or may not have happened.
    UNKNOWN = "unknown"
    #: Cancelled on request before it ended.
    CANCELLED = "cancelled"


class WaitKind(StrEnum):
    """What a parked program waits for."""

    #: The decision of a person on its call.
    APPROVAL = "approval"
    #: The end of a job.
    JOB = "job"
    TIME = "time"
    #: The answer of a person.
    ANSWER = "answer"
    #: Nothing: the row has what the program repeats of one of another chat.
    COPY = "copy"


class JobLogKind(StrEnum):
    """What an entry of a background job's log records."""

    #: A worker began an attempt.
    STARTED = "started"
    #: The job reported its progress.
    REPORT = "report"
    #: The job's code wrote a log record.
    LINE = "line"
    #: The worker stopped, and gave the job back to be continued by another one.
    RELEASED = "released"
    #: The attempt met an outage; the job starts again.
    RESTARTED = "restarted"
    #: The job was asked to end.
    CANCEL_REQUESTED = "cancel_requested"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ApprovalState(StrEnum):
    """State of a request for approval of a call."""

    #: Not decided yet.
    PENDING = "pending"
    #: The call may run once.
    APPROVED = "approved"
    #: The call does not run.
    DENIED = "denied"
    #: Not decided in time; the call does not run.
    EXPIRED = "expired"
    #: The request was withdrawn: its turn was cancelled, or its chat was reset.
    CANCELLED = "cancelled"


class ApprovalScope(StrEnum):
    """What an approval permits besides its own call."""

    #: Nothing.
    ONCE = "once"
    #: Calls of the same method in the same turn, and in the turns that its approved calls begin.
    TURN = "turn"
    #: Calls of the same method in the same chat, for a limited time.
    CHAT = "chat"


class StoredKind(StrEnum):
    """What a key of the HTTP API keeps stored, by when that is deleted."""

    #: Messages (``NEKRO_RETENTION__MESSAGES_DAYS``).
    MESSAGES = "messages"
    #: Rounds, events, timers, jobs and responses (``NEKRO_RETENTION__ROUNDS_DAYS``).
    ROUNDS = "rounds"
    #: What rounds sent to the model (``prompts_days``).
    PROMPTS = "prompts"
    #: Calls and runs (``calls_days``).
    CALLS = "calls"
    #: Answers to requests with an idempotency key, and reservations of files that are being stored.
    REQUESTS = "requests"
    #: Files in the uploads of chats (``NEKRO_RETENTION__UPLOADS_DAYS``).
    FILES = "files"
    #: Chats; they stay.
    CHATS = "chats"
    #: Webhooks and MCP servers, until they are removed.
    DECLARATIONS = "declarations"


class BudgetScope(StrEnum):
    """Whose spending a budget limits."""

    #: One turn, as long as it lasts.
    TURN = "turn"
    #: One chat, per day (UTC), as all that follow.
    CHAT = "chat"
    #: One person on one adapter.
    USER = "user"
    #: The turns that one key of the HTTP API started.
    KEY = "key"
    #: What one plugin asked of models itself.
    PLUGIN = "plugin"
    #: The whole system.
    DAY = "day"


class RoundState(StrEnum):
    """State of a round of the LLM."""

    #: Requested, not started yet.
    REQUESTED = "requested"
    #: The holder of the chat's lease runs it; at most one per chat.
    RUNNING = "running"
    #: Completed, with any exit code.
    DONE = "done"
    #: Could not be carried out (no LLM, no sandbox, too many crashes).
    FAILED = "failed"
    #: Cancelled on request.
    CANCELLED = "cancelled"
    #: Answered by the round that ``merged_into`` names.
    MERGED = "merged"


class TriggerKind(StrEnum):
    """What caused a round; kind and trigger id together are unique."""

    #: A message of a user or the system; the trigger id is the message id.
    MESSAGE = "message"
    #: An AGENT or MULTIMODAL_AGENT call; the trigger id is the call id.
    CALL = "call"
    #: A timer or cron job; the trigger id names the firing.
    TIMER = "timer"
    #: The previous round, which ended with an error, a timeout or a manual stop; the trigger id is its id.
    ROUND = "round"
    #: A background job that reported to the agent.
    JOB = "job"
    #: A command of an operator.
    MANUAL = "manual"


class CrashPolicy(StrEnum):
    """What happens to a job whose worker died."""

    #: Another worker starts it again.
    RESTART = "restart"
    #: It fails, with the reason in its message.
    FAIL = "fail"


class TimerState(StrEnum):
    """State of a one-time timer."""

    WAITING = "waiting"
    #: Does not fire until it is resumed.
    PAUSED = "paused"
    FIRED = "fired"
    CANCELLED = "cancelled"


class OverrideSource(StrEnum):
    """Origin of a method's lane override."""

    #: The watchdog detected that the method blocks the event loop.
    WATCHDOG = "watchdog"
    #: An operator set it; the watchdog does not change it.
    OPERATOR = "operator"


OPEN_TIMER_STATES: Final = (TimerState.WAITING, TimerState.PAUSED)
FINAL_CALL_STATES: Final = frozenset(
    {CallState.DONE, CallState.FAILED, CallState.UNKNOWN, CallState.CANCELLED}
)
FINAL_ROUND_STATES: Final = frozenset(
    {RoundState.DONE, RoundState.FAILED, RoundState.CANCELLED, RoundState.MERGED}
)
FINAL_JOB_STATES: Final = frozenset(state for state in JobState if state.is_final)


class SendState(StrEnum):
    """State of a request to a client of an adapter."""

    #: No client has it, or it is due again.
    WAITING = "waiting"
    #: A client received it and has not answered.
    SENT = "sent"
    #: The client confirmed it.
    DONE = "done"
    #: The client refused it as often as allowed, or it was not answered in time.
    FAILED = "failed"


class DeliveryState(StrEnum):
    """State of an event's delivery to a webhook's URL."""

    #: Due at once or later.
    WAITING = "waiting"
    #: The URL answered with a status from 200 to 299.
    DONE = "done"
    #: Dead letter: given up after all attempts.
    DEAD = "dead"
