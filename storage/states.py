"""The states that rows go through, and which are final. Transitions are the repositories' methods."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from nekro_agent.ports import JobState

__all__ = [
    "FINAL_CALL_STATES",
    "FINAL_JOB_STATES",
    "FINAL_ROUND_STATES",
    "CallState",
    "CrashPolicy",
    "JobState",
    "MarkSource",
    "RoundState",
    "TimerState",
    "TriggerKind",
]


class CallState(StrEnum):
    """Where a call of a plugin method is."""

    #: Recorded, not claimed by a worker yet.
    QUEUED = "queued"
    #: A worker holds the claim and may be inside the method.
    RUNNING = "running"
    #: The method returned; the outcome is kept for repeated deliveries.
    DONE = "done"
    #: The method raised, or its result could not be used.
    FAILED = "failed"
    #: The worker died inside the method: its effect may or may not have happened.
    UNKNOWN = "unknown"
    #: Cancelled on purpose before it ended.
    CANCELLED = "cancelled"


class RoundState(StrEnum):
    """Where a round of the LLM is."""

    #: Waits for its chat.
    REQUESTED = "requested"
    #: The holder of the chat's lease works on it; at most one per chat.
    RUNNING = "running"
    #: Ended by itself, whatever the code's exit was.
    DONE = "done"
    #: Could not be carried out (no LLM, no sandbox, too many crashes).
    FAILED = "failed"
    #: Stopped by a person.
    CANCELLED = "cancelled"
    #: Taken along by the round that ``merged_into`` names.
    MERGED = "merged"


class TriggerKind(StrEnum):
    """What asked for a round; together with its id it is unique."""

    #: A person's or the system's message; the id is the message's.
    MESSAGE = "message"
    #: An AGENT or MULTIMODAL_AGENT call; the id is the call's.
    CALL = "call"
    #: A timer or cron job; the id names the firing.
    TIMER = "timer"
    #: The round before, which ended in an error, a timeout or by hand; the id is that round's.
    ROUND = "round"
    #: A background job that reported to the agent.
    JOB = "job"
    #: A person at the command line.
    MANUAL = "manual"


class CrashPolicy(StrEnum):
    """What becomes of a job whose worker died."""

    #: Another worker starts it again.
    RESTART = "restart"
    #: It fails, and says why.
    FAIL = "fail"


class TimerState(StrEnum):
    """Where a one-time timer is."""

    WAITING = "waiting"
    FIRED = "fired"
    CANCELLED = "cancelled"


class MarkSource(StrEnum):
    """Who sent a method to another lane."""

    #: The watchdog saw it block an event loop.
    WATCHDOG = "watchdog"
    #: A person decided; the watchdog does not change that.
    OPERATOR = "operator"


FINAL_CALL_STATES: Final = frozenset(
    {CallState.DONE, CallState.FAILED, CallState.UNKNOWN, CallState.CANCELLED}
)
FINAL_ROUND_STATES: Final = frozenset(
    {RoundState.DONE, RoundState.FAILED, RoundState.CANCELLED, RoundState.MERGED}
)
FINAL_JOB_STATES: Final = frozenset(state for state in JobState if state.is_final)
