"""Reads the recordings of a turn's programs from its rows and events."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nekro.app.calls.journal import program_ids
from nekro.app.calls.records import end_of_row, still_running, was_decided
from nekro.app.rounds.replays import RecordedCall, Recording, name_of
from nekro.broker.calls import envelope_of
from nekro.sandbox.models import STOPS, Raised, Returned, Stopped, StopType, StubResult
from nekro.wire import plain_json
from nekro.wire.invocation import Envelope
from nekro.wire.seals import ProgramSecrets
from nekro_agent.errors import MethodFailedError, NekroError, NotFoundError
from nekro_agent.methods import SandboxMethodType
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.calls import Call
from storage.repositories.events import ChatEvent
from storage.repositories.rounds import Round
from storage.states import RoundState
from storage.transaction import Transaction

__all__ = ["RecordedTurn", "read_turn", "recording_of"]


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """A turn; ``recordings`` are those of its programs, in order."""

    turn_id: str
    chat_key: str
    rounds: Sequence[Round]
    recordings: Sequence[Recording]


async def read_turn(database: Database, secrets: ProgramSecrets, turn_id: str) -> RecordedTurn:
    """Read what is recorded of a turn.

    Raises:
        NotFoundError: there is no such turn.
        StorageUnavailableError: the database does not answer.
    """
    async with database.read() as transaction:
        rounds = [
            item
            for item in await transaction.rounds.rounds_of_turns(turn_id)
            if item.turn_id == turn_id and item.state is not RoundState.MERGED
        ]
        if not rounds:
            raise NotFoundError(f"there is no turn {turn_id}")
        begun = [await transaction.rounds.find(item.program_id) for item in rounds if item.program_id]
        turns = {turn_id, *(first.turn_id for first in begun if first is not None)}
        events = [event for one in turns for event in await transaction.events.of_turn(one)]
        recordings = [await recording_of(transaction, item, events, secrets) for item in rounds if item.code]
    return RecordedTurn(turn_id=turn_id, chat_key=rounds[0].chat_key, rounds=rounds, recordings=recordings)


async def recording_of(
    transaction: Transaction,
    item: Round,
    events: Sequence[ChatEvent],
    secrets: ProgramSecrets,
    *,
    results: Mapping[str, Any] | None = None,
) -> Recording:
    """Read what is recorded of the program of one round.

    Args:
        events: those of its turns, and of others.
        results: answers that Redis still has, by call id, as workers stored them.
    """
    program_id = item.program_id or item.id
    rows = await transaction.calls.of_program(program_id)
    parked = await transaction.parked_programs.of_program(program_id)
    origin = await transaction.parked_programs.origin(program_id)
    stored = ChainMap(*(one.answers for one in parked), dict(results or {}))
    return Recording(
        round_id=item.id,
        number=item.number,
        chat_key=item.chat_key,
        code=item.code or "",
        seed=program_ids(secrets, origin, program_id, item.chat_key)[1],
        readings=item.readings or "",
        new_ids=lambda: program_ids(secrets, origin, program_id, item.chat_key)[0].next,
        calls=_calls(item, rows, events, stored),
        stop_type=None if item.stop_type is None else StopType(item.stop_type),
        output=item.output,
    )


def _calls(
    item: Round, rows: Sequence[Call], events: Sequence[ChatEvent], stored: Mapping[str, Any]
) -> dict[str, RecordedCall]:
    """Return the calls that a program made in a round, by id.

    The answer is that of its row, what a worker stored and a wait has kept, or that of its event.
    """
    by_id = {row.id: row for row in rows}
    ended = {
        event.call_id: event.data
        for event in events
        if event.type == EventType.CALL_ENDED and event.call_id and event.data.get("state") != "awaiting"
    }
    if item.calls is None:  # its worker died and has left no list
        return {row.id: replace(_call_of(row), answer=_of_row(row)) for row in rows}
    found = {}
    for listed in item.calls:
        call_id = listed["id"]
        path = listed["method"]
        call = RecordedCall(
            path=path,
            called_as=listed.get("called_as", name_of(path)),
            type=SandboxMethodType(listed["type"]),
            answer=None,
        )
        if listed["awaits_approval"] or listed.get("is_waiting"):
            # The round ended at it, whatever became of it later.
            answer: StubResult | None = Stopped(stop=StopType(item.stop_type or StopType.APPROVAL))
        elif call_id in by_id:
            answer = _of_row(by_id[call_id])
        elif call_id in stored:
            answer = _of_stored(stored[call_id])
        else:
            answer = _of_event(call, call_id, ended.get(call_id))
        found[call_id] = replace(call, answer=answer)
    return found


def _call_of(row: Call) -> RecordedCall:
    return RecordedCall(path=row.method, called_as=name_of(row.method), type=row.type, answer=None)


def _of_row(row: Call) -> StubResult | None:
    if row.detached_at is not None and not was_decided(row):
        return still_running(_call_of(row), row.id)
    end = end_of_row(row)
    if isinstance(end, NekroError):
        return Raised(error_type=row.error_type or type(end).__name__, message=row.error_message or str(end))
    if end is None:
        return Stopped(stop=StopType.APPROVAL)
    return _of_envelope(Envelope.model_validate(end))


def _of_stored(record: Mapping[str, Any]) -> StubResult:
    try:
        return _of_envelope(envelope_of(record))
    except MethodFailedError as exc:
        return Raised(error_type=exc.error_type, message=exc.error_message)
    except NekroError as exc:
        return Raised(error_type=type(exc).__name__, message=str(exc))


def _of_envelope(envelope: Envelope) -> StubResult:
    stop = STOPS.get(envelope.type)
    return Stopped(stop=stop) if stop is not None else Returned(value=envelope.value_bytes())


def _of_event(call: RecordedCall, call_id: str, data: Mapping[str, Any] | None) -> StubResult | None:
    if data is None:
        return None
    if data.get("state") == "running":
        return still_running(call, call_id)
    if data.get("error"):
        error_type, _, message = data["error"].partition(": ")
        return Raised(error_type=error_type, message=message)
    if call.type in STOPS:
        return Stopped(stop=STOPS[call.type])
    return Returned(value=plain_json.dump(data["value"])) if "value" in data else None
