"""Frozen values that describe rounds: request, report, recorded round and claimed round."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from nekro_agent.ports import ChatInfo
from storage.sql import now
from storage.states import RoundState, TriggerKind, new_id

__all__ = ["ClaimedRound", "Round", "RoundReport", "RoundRequest", "Standing", "values_of_merged"]


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """A request for a round."""

    chat_key: str
    trigger_kind: TriggerKind
    #: Unique per kind: a second request with the same trigger returns the first one's round.
    trigger_id: str
    id: str = field(default_factory=new_id)
    #: The turn that the round continues; None begins a new turn with the round's id.
    turn_id: str | None = None
    #: The round whose program is to go on; None: the model is asked.
    program_id: str | None = None
    #: The turn whose work caused the new turn, by a call or job that outlived it; None if none did.
    cause_turn_id: str | None = None
    #: What caused the new turn, if no turn did that a key pays for (``nekro_agent.execution.current``): the
    #: key that pays for it pays for the turn.
    account_id: str | None = None
    #: Position in its turn, from 1.
    number: int = 1
    #: Platform id of the user who began the turn; None if no user did.
    user_id: str | None = None
    #: The part of an AGENT call's result that the LLM sees.
    observation: str | None = None
    #: Content parts of a MULTIMODAL_AGENT call's result.
    segments: list[dict[str, Any]] | None = None
    #: How long the round waits for more triggers of its chat; >= 0.
    delay_seconds: float = 0


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """The data of a round so far; None means "not known" and keeps the recorded value."""

    prompt_chars: int | None = None
    model: str | None = None
    answer: str | None = None
    code: str | None = None
    stop_type: int | None = None
    exit_code: int | None = None
    output: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    #: Whether the endpoint reported no possible number of tokens.
    tokens_estimated: bool | None = None
    cost: float | None = None
    #: The calls of its code as JSON data, shown by ``nekro history --trace``.
    calls: list[dict[str, Any]] | None = None
    error: str | None = None
    #: Why its program cannot be run again if its worker dies; "": it can. None: there is no program yet, or
    #: it is of a worker of a version that made its calls with other ids.
    not_resumable: str | None = None
    #: What its program has read, as ``RunRequest.readings``.
    readings: str | None = None


@dataclass(frozen=True, kw_only=True)
class Round(RoundReport):
    """One recorded round."""

    #: Position among all rounds; within a chat, a larger one was requested later.
    sequence: int
    id: str
    chat_key: str
    turn_id: str
    number: int
    trigger_kind: TriggerKind
    trigger_id: str
    state: RoundState
    #: How many times it was started.
    attempt: int
    fence: int
    worker: str | None
    #: Id of the round that this one was merged into.
    merged_into: str | None
    requested_at: datetime
    not_before: datetime
    started_at: datetime | None
    answered_at: datetime | None
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    user_id: str | None
    observation: str | None
    segments: list[dict[str, Any]] | None
    #: The turn in whose trace this one is; None if no other turn caused it.
    root_turn_id: str | None = None
    #: The key that pays for the turn; empty: no key does. None: a worker of 0.2.0 requested the round.
    key_id: str | None = None
    #: As in ``RoundRequest``.
    program_id: str | None = None

    @property
    def resumes(self) -> bool:
        """Whether an attempt at it runs a program again: that of its own answer, or of an earlier round."""
        return self.answered_at is not None or self.program_id is not None


class Standing(NamedTuple):
    """How a round stands, as a call of its code asks; both are False if it has no row."""

    is_running: bool
    is_asked_to_stop: bool


@dataclass(frozen=True, kw_only=True)
class ClaimedRound:
    """A round to run now, with the later rounds that were merged into it, in order."""

    round: Round
    merged: tuple[Round, ...]
    #: Its chat when it was started; None: not known.
    chat: ChatInfo | None = None

    @property
    def triggers(self) -> tuple[Round, ...]:
        """All requests that this round answers, in order."""
        return (self.round, *self.merged)

    @property
    def user_id(self) -> str | None:
        """The first user among its triggers; None if no user caused it."""
        return next((trigger.user_id for trigger in self.triggers if trigger.user_id is not None), None)


def values_of_merged(round_id: str) -> dict[str, Any]:
    """Return what a round's row gets when it is merged into the round with this id."""
    return {"state": RoundState.MERGED, "merged_into": round_id, "finished_at": now()}
