"""The state of a turn, from its rounds and the event of its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from nekro_client.models import TurnCause, TurnError, TurnState
from storage.repositories.events import ChatEvent
from storage.states import ApprovalState, RoundState, TriggerKind

__all__ = ["TurnEnd", "awaited", "turn_cause"]

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
    ) -> None:
        """Compute the state from the rows.

        Args:
            rounds: rounds of the turn, at least one.
            takers: rounds of other turns into which some of them were merged.
            end: its event ``turn.ended``; None while it is open, or if the event has expired.
            approvals: the states of the requests that ``awaited`` names.
        """
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
        if self.waits_for:
            return TurnState.WAITING
        is_withdrawn = any(state is ApprovalState.CANCELLED for _, state in self._approvals)
        return TurnState.CANCELLED if is_withdrawn else TurnState.DONE

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


def turn_cause(item: _Round) -> TurnCause:
    """Return what caused a round."""
    return TurnCause(kind=item.trigger_kind.value, id=item.trigger_id)
