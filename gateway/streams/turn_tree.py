"""Turns as trees, and the rounds of a chat, from rows and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from gateway.views import job_answer, message_answer
from nekro_agent.methods import SandboxMethodType
from nekro_client import models
from nekro_client.models import TurnCause, TurnError, TurnState
from sandbox.models import StopType
from storage.repositories.calls import Call
from storage.repositories.events import ChatEvent
from storage.repositories.rounds import Round
from storage.states import EventType, RoundState
from storage.transaction import Transaction
from workers.calls.story import told_calls
from workers.composition import Services

__all__ = ["read_rounds", "read_turn"]

_TURN_STATES = {
    RoundState.DONE: TurnState.DONE,
    RoundState.FAILED: TurnState.FAILED,
    RoundState.CANCELLED: TurnState.CANCELLED,
}
#: Code of a failed turn whose end was not recorded as an event, or whose events have expired.
_UNKNOWN = "round_failed"


async def read_turn(services: Services, turn_id: str) -> models.Turn:
    """Return a turn with everything that is recorded of it.

    The rounds are its own, and the ones of other turns into which its rounds were merged.

    Raises:
        NotFoundError: there is no such turn.
    """
    async with services.database.read() as transaction:
        first = await transaction.rounds.get(turn_id)
        rounds = [
            item for item in await transaction.rounds.rounds_of_turns(turn_id) if item.turn_id == turn_id
        ]
        takers = [await transaction.rounds.get(item.merged_into) for item in rounds if item.merged_into]
        events = await transaction.events.of_turn(turn_id)
        for taker in takers:
            events += await transaction.events.of_turn(taker.turn_id)
        messages = await transaction.messages.of_turn(turn_id)
        jobs = await transaction.jobs.of_turn(turn_id)
        shown = sorted(
            {item.id: item for item in (*rounds, *takers)}.values(), key=lambda item: item.sequence
        )
        details = [_round(item, await _calls(transaction, item), events) for item in shown]
    end = next((item for item in events if _is_end(item, turn_id)), None)
    return models.Turn(
        id=turn_id,
        chat_key=first.chat_key,
        state=_state(rounds, takers, end),
        cause=_cause(first),
        merged_into=next((taker.turn_id for taker in takers), None),
        requested_at=first.requested_at,
        started_at=min((item.started_at for item in shown if item.started_at), default=None),
        finished_at=_finished_at(rounds, takers, end),
        error=_error(rounds, takers, end),
        rounds=details,
        messages=[message_answer(item, services.file_ids) for item in messages],
        jobs=[job_answer(item) for item in jobs],
    )


async def read_rounds(
    services: Services, chat_key: str, *, limit: int, before: int | None
) -> list[tuple[int, models.Round]]:
    """Return the newest rounds of a chat, the newest first, each with its position among all rounds.

    Their calls are without arguments and values, which the turn's tree has.

    Args:
        before: only rounds with a smaller position; None does not limit.
    """
    async with services.database.read() as transaction:
        rows = await transaction.rounds.newest(chat_key, limit=limit, before=before)
        found = [(row.sequence, _round(row, await _calls(transaction, row), ())) for row in rows]
    return found[::-1]


def _is_end(event: ChatEvent, turn_id: str) -> bool:
    return event.type == EventType.TURN_ENDED and event.turn_id == turn_id


def _cause(item: Round) -> TurnCause:
    return TurnCause(kind=item.trigger_kind.value, id=item.trigger_id)


def _open(rounds: Sequence[Round], takers: Sequence[Round]) -> list[Round]:
    return [item for item in (*rounds, *takers) if item.state in (RoundState.REQUESTED, RoundState.RUNNING)]


def _last(rounds: Sequence[Round], takers: Sequence[Round]) -> Round:
    """Return the round that ended last, or the newest one."""
    ended = [item for item in (*rounds, *takers) if item.state is not RoundState.MERGED]
    return max(ended or rounds, key=lambda item: (item.finished_at or item.requested_at, item.sequence))


def _state(rounds: Sequence[Round], takers: Sequence[Round], end: ChatEvent | None) -> TurnState:
    if end is not None:
        return TurnState(end.data["state"])
    if not _open(rounds, takers):
        return _TURN_STATES[_last(rounds, takers).state]
    has_started = any(item.started_at is not None for item in (*rounds, *takers))
    return TurnState.RUNNING if has_started else TurnState.WAITING


def _finished_at(rounds: Sequence[Round], takers: Sequence[Round], end: ChatEvent | None) -> datetime | None:
    if end is not None:
        return end.created_at
    return None if _open(rounds, takers) else _last(rounds, takers).finished_at


def _error(rounds: Sequence[Round], takers: Sequence[Round], end: ChatEvent | None) -> TurnError | None:
    if _state(rounds, takers, end) is not TurnState.FAILED:
        return None
    if end is not None and "error" in end.data:
        return TurnError(code=end.data["error"]["code"], text=end.data["error"]["text"])
    return TurnError(code=_UNKNOWN, text=_last(rounds, takers).error or "")


async def _calls(transaction: Transaction, item: Round) -> list[tuple[dict[str, Any], Call | None]]:
    """Return the calls of a round, and their rows where they have some."""
    rows = await transaction.calls.of_round(item.id)
    by_id = {row.id: row for row in rows}
    approvals = await transaction.approvals.of_calls(rows)
    return [(call, by_id.get(call["id"])) for call in told_calls(item.calls or [], rows, approvals)]


def _round(
    item: Round, calls: Sequence[tuple[dict[str, Any], Call | None]], events: Sequence[ChatEvent]
) -> models.Round:
    own = [event for event in events if event.round_id == item.id]
    known = {call["id"]: (call, row) for call, row in calls}
    # While the round runs its row has no calls yet, but the events have them.
    for event in own:
        if event.call_id is not None and event.type == EventType.CALL_STARTED:
            known.setdefault(event.call_id, ({"id": event.call_id, **event.data}, None))
    return models.Round(
        id=item.id,
        turn_id=item.turn_id,
        number=item.number,
        state=item.state.value,
        cause=_cause(item),
        attempt=item.attempt,
        worker=item.worker,
        user_id=item.user_id,
        merged_into=item.merged_into,
        requested_at=item.requested_at,
        started_at=item.started_at,
        answered_at=item.answered_at,
        finished_at=item.finished_at,
        cancel_requested_at=item.cancel_requested_at,
        prompt_chars=item.prompt_chars,
        observation=item.observation,
        model=item.model,
        prompt_tokens=item.prompt_tokens,
        completion_tokens=item.completion_tokens,
        cost=item.cost,
        answer=item.answer,
        code=item.code,
        output=item.output,
        stop_type=None if item.stop_type is None else StopType(item.stop_type).name,
        exit_code=item.exit_code,
        calls=[_call(call, row, own) for call, row in known.values()],
        error=_round_error(item),
    )


def _round_error(item: Round) -> TurnError | None:
    return None if item.error is None else TurnError(code=item.state.value, text=item.error)


def _call(call: Mapping[str, Any], row: Call | None, events: Sequence[ChatEvent]) -> models.Call:
    own = {event.type: event for event in events if event.call_id == call["id"]}
    began, ended = own.get(EventType.CALL_STARTED), own.get(EventType.CALL_ENDED)
    value = ended.data.get("value") if ended is not None else None
    if value is None and row is not None and row.outcome is not None:
        value = row.outcome.get("text")
    error = call.get("error") or (ended.data.get("error") if ended is not None else None)
    return models.Call(
        id=call["id"],
        method=call["method"],
        type=SandboxMethodType(call["type"]).value,
        state=_call_state(call, row, ended),
        lane=call.get("lane"),
        worker=call.get("worker") or None,
        requested_at=call.get("requested_at") or (began.created_at if began is not None else None),
        started_at=call.get("started_at"),
        finished_at=call.get("finished_at"),
        duration_ms=call.get("duration_ms"),
        attempts=None if row is None else row.fence,
        arguments=None if began is None else began.data.get("arguments"),
        value=value,
        error=None if error is None else _call_error(error),
        follow_up=call.get("follow_up"),
        approval_id=call.get("approval_id"),
    )


def _call_state(call: Mapping[str, Any], row: Call | None, ended: ChatEvent | None) -> str:
    if row is not None:
        return row.state.value
    if ended is not None:
        return str(ended.data["state"])
    if "duration_ms" not in call:
        return "running"
    return "done" if call["error"] is None else "failed"


def _call_error(text: str) -> TurnError:
    """Split ``<type>: <message>``, as the sandboxed code saw it."""
    code, _, message = text.partition(": ")
    return TurnError(code=code, text=message or text)
