"""The state of a turn and of its rounds, from rows and events.

A round has its attempts, the request to the model and its calls; a turn its rounds and the event of its
end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from nekro_client.event_types import STARTS_OF_ATTEMPTS, EventType
from nekro_client.models import RoundAttempt, TurnCause, TurnError, TurnState, Wait
from storage.repositories.events import ChatEvent
from storage.repositories.rounds import Round
from storage.states import ApprovalState, CallState, RoundState, TriggerKind

__all__ = [
    "RoundEvents",
    "TurnEnd",
    "awaited",
    "awaited_calls",
    "by_round",
    "turn_cause",
]


_TURN_STATES: Mapping[RoundState, TurnState] = {
    RoundState.DONE: TurnState.DONE,
    RoundState.FAILED: TurnState.FAILED,
    RoundState.CANCELLED: TurnState.CANCELLED,
}
#: Code of a failed turn whose end was not recorded as an event, or whose events have expired.
_UNKNOWN = "round_failed"


class _Round(Protocol):
    @property
    def sequence(self) -> int: ...
    @property
    def state(self) -> RoundState: ...
    @property
    def trigger_kind(self) -> TriggerKind: ...
    @property
    def trigger_id(self) -> str: ...
    @property
    def requested_at(self) -> datetime: ...
    @property
    def started_at(self) -> datetime | None: ...
    @property
    def finished_at(self) -> datetime | None: ...
    @property
    def error(self) -> str | None: ...


class TurnEnd:
    """How a turn stands."""

    def __init__(
        self,
        rounds: Sequence[_Round],
        takers: Sequence[_Round],
        end: ChatEvent | None,
        approvals: Mapping[str, ApprovalState],
        calls: Mapping[str, CallState] = {},
    ) -> None:
        """Compute the state from the rows.

        Args:
            rounds: rounds of the turn, at least one.
            takers: rounds of other turns that took in some of them.
            end: its event ``turn.ended``; None while it is open, or if the event has expired.
            approvals: the states of the requests that ``awaited`` names.
            calls: the states of the calls that ``awaited_calls`` names.
        """
        self._waits = [(one, calls[one["call_id"]]) for one in _waits(end) if one["call_id"] in calls]
        self._approvals = [(one, approvals[one]) for one in awaited(end) if one in approvals]
        self._rounds, self._all, self._end = rounds, (*rounds, *takers), end

    @property
    def state(self) -> TurnState:
        """Its state."""
        if self._end is not None:
            state = TurnState(self._end.data["state"])
            return self._after_wait() if state is TurnState.WAITING else state
        if not self._open():
            return _TURN_STATES[self._last().state]
        has_started = any(item.started_at is not None for item in self._all)
        return TurnState.RUNNING if has_started else TurnState.WAITING

    @property
    def waits_for(self) -> list[str]:
        """The requests for approval that people have not decided yet."""
        return [one for one, state in self._approvals if state is ApprovalState.PENDING]

    @property
    def waits(self) -> list[Wait]:
        """What its program waits for, but the decisions of people."""
        return [Wait.model_validate(one) for one, state in self._waits if state is CallState.AWAITING]

    @property
    def started_at(self) -> datetime | None:
        """When its first round started."""
        return min((item.started_at for item in self._all if item.started_at), default=None)

    @property
    def finished_at(self) -> datetime | None:
        """When its last round ended; None while one is open."""
        if self._end is not None:
            return self._end.created_at
        return None if self._open() else self._last().finished_at

    @property
    def error(self) -> TurnError | None:
        """Why it failed; None if it did not."""
        if self.state is not TurnState.FAILED:
            return None
        if self._end is not None and "error" in self._end.data:
            return TurnError(code=self._end.data["error"]["code"], text=self._end.data["error"]["text"])
        return TurnError(code=_UNKNOWN, text=self._last().error or "")

    def _after_wait(self) -> TurnState:
        if self.waits_for or self.waits:
            return TurnState.WAITING
        is_withdrawn = any(state is ApprovalState.CANCELLED for _, state in self._approvals)
        is_cancelled = any(state is CallState.CANCELLED for _, state in self._waits)
        return TurnState.CANCELLED if is_withdrawn or is_cancelled else TurnState.DONE

    def _open(self) -> bool:
        return any(item.state in (RoundState.REQUESTED, RoundState.RUNNING) for item in self._all)

    def _last(self) -> _Round:
        """Return the round that ended last, or the newest one."""
        ended = [item for item in self._all if item.state is not RoundState.MERGED]
        return max(
            ended or self._rounds, key=lambda item: (item.finished_at or item.requested_at, item.sequence)
        )


def awaited(end: ChatEvent | None) -> list[str]:
    """Return the requests for approval that were not decided when a turn ended."""
    return [] if end is None else list(end.data.get("waits_for", ()))


def awaited_calls(end: ChatEvent | None) -> list[str]:
    """Return the calls in which programs waited for something else when a turn ended."""
    return [one["call_id"] for one in _waits(end)]


def _waits(end: ChatEvent | None) -> list[dict[str, Any]]:
    return [] if end is None else list(end.data.get("waits", ()))


def turn_cause(item: _Round) -> TurnCause:
    """Return what caused a round."""
    return TurnCause(kind=item.trigger_kind.value, id=item.trigger_id)


class RoundEvents:
    """What the events tell of a round; nothing if they have expired."""

    def __init__(self, events: Sequence[ChatEvent]) -> None:
        """``events`` are those of the round, in order."""
        #: By call id and type.
        self.of_calls: defaultdict[str, dict[str, ChatEvent]] = defaultdict(dict)
        #: The attempt at the round in which a call began.
        self.attempt_of_call: dict[str, int] = {}
        self.answered: ChatEvent | None = None
        self._starts: list[ChatEvent] = []
        self._ends: dict[int, ChatEvent] = {}
        self._last: dict[int, datetime] = {}
        self._prompted: dict[int, datetime] = {}
        for event in events:
            self._add(event)

    def _add(self, event: ChatEvent) -> None:
        if event.type in STARTS_OF_ATTEMPTS:
            self._starts.append(event)
        attempt = self.attempt
        self._last[attempt] = max(event.created_at, self._last.get(attempt, event.created_at))
        if event.call_id is not None:
            self.of_calls[event.call_id][event.type] = event
            if event.type == EventType.CALL_STARTED:
                self.attempt_of_call[event.call_id] = attempt
        elif event.type == EventType.MODEL_REQUESTED:
            self._prompted[attempt] = event.created_at
        elif event.type == EventType.CODE_READY:
            self.answered = event
        elif event.type == EventType.ROUND_ENDED:
            self._ends[attempt] = event

    @property
    def attempt(self) -> int:
        """The newest attempt that is recorded; 0: none."""
        return int(self._starts[-1].data["attempt"]) if self._starts else 0

    @property
    def prompted_at(self) -> datetime | None:
        """When the newest attempt asked the model."""
        return self._prompted.get(self.attempt)

    def attempts(self, item: Round) -> list[RoundAttempt]:
        """Return the attempts at a round, in order; only the newest one if its events have expired."""
        found = [self._attempt(event, item) for event in self._starts]
        if item.attempt > self.attempt and item.started_at is not None:
            found.append(
                RoundAttempt(
                    number=item.attempt,
                    worker=item.worker,
                    started_at=item.started_at,
                    ended_at=item.finished_at,
                    outcome=_outcome(item),
                )
            )
        return found

    def _attempt(self, start: ChatEvent, item: Round) -> RoundAttempt:
        number = int(start.data["attempt"])
        is_newest = number >= item.attempt
        ended = self._ends.get(number)
        if is_newest and item.state is RoundState.REQUESTED:
            outcome = "lost"  # its worker died, and the round waits for the next one
        elif is_newest:
            outcome = _outcome(item)
        else:
            outcome = "lost" if ended is None else "ended"
        return RoundAttempt(
            number=number,
            worker=start.data.get("worker"),
            started_at=start.created_at,
            ended_at=None if ended is None else ended.created_at,
            last_event_at=self._last.get(number),
            outcome=outcome,
            is_resumed=start.type == EventType.PROGRAM_RESUMED,
        )


def by_round(events: Iterable[ChatEvent]) -> dict[str, list[ChatEvent]]:
    """Return events by their rounds, in order."""
    found: defaultdict[str, list[ChatEvent]] = defaultdict(list)
    for event in events:
        if event.round_id is not None:
            found[event.round_id].append(event)
    return found


def _outcome(item: Round) -> str:
    return "running" if item.state is RoundState.RUNNING else "ended"
