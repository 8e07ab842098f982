"""The events of one round: its attempts, the request to the model, its calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime

from nekro_client.models import RoundAttempt
from storage.repositories.events import ChatEvent
from storage.repositories.rounds import Round
from storage.states import EventType, RoundState

__all__ = ["RoundEvents", "by_round"]


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
        if event.type == EventType.ROUND_STARTED:
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
