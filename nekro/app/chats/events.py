"""The one writer of chats' events, in the transaction that makes the change.

They are announced after the commit. The announcement names the chat, the newest number and the types of the
events; subscribers read the rows. A lost announcement delays a reader until it looks by itself.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from nekro.app.chats.publisher import EventPublisher
from nekro.sandbox.models import StopType
from nekro_agent.errors import NotFoundError
from nekro_agent.ports import MessageKind
from storage.repositories.events import NewEvent
from storage.repositories.jobs import Job
from storage.repositories.messages import Message
from storage.repositories.rounds import ClaimedRound, Round
from storage.states import EventType
from storage.transaction import Transaction

__all__ = [
    "message_event",
    "record",
    "record_caused",
    "record_job",
    "round_ended",
    "round_started",
    "turn_started",
]

#: Parts of a message's data that its event repeats.
_FILE_FIELDS: Final = ("file_path", "file_name", "file_kind", "media_type", "reply_to")
#: Characters of a round's output in its event; the round's row has more.
_OUTPUT_CHARS: Final = 16_000


def record(
    transaction: Transaction,
    publisher: EventPublisher,
    chat_key: str,
    *events: NewEvent,
    later: bool = False,
) -> None:
    """Append events to a chat with the transaction, and announce them after its commit.

    Args:
        later: announce after a short delay, because a caller waits for other work of this process.
    """
    is_first = not transaction.events.has_waiting(chat_key)
    transaction.events.add(chat_key, *events)
    if is_first:

        async def announce() -> None:
            number = transaction.events.numbers.get(chat_key)
            if number is not None:
                types = transaction.events.types[chat_key]
                publisher.events_added(chat_key, number, types=types, later=later)

        transaction.after_commit(announce)


def message_event(row: Message) -> NewEvent:
    """Return the event of a new message."""
    data = row.data or {}
    found: dict[str, Any] = {
        "kind": row.kind.value,
        "sequence": row.sequence,
        "text": row.text,
        "sender_id": row.sender_id,
        "sender_name": row.sender_name,
        "plugin": row.plugin_key,
        **{name: data.get(name) for name in _FILE_FIELDS},
    }
    return NewEvent(
        type=_message_type(row),
        turn_id=row.turn_id,
        round_id=row.round_id,
        call_id=row.call_id,
        message_id=row.id,
        data={name: value for name, value in found.items() if value is not None},
    )


def _message_type(row: Message) -> EventType:
    if row.kind is MessageKind.USER:
        return EventType.MESSAGE_RECEIVED
    if row.kind is MessageKind.SYSTEM:
        return EventType.MESSAGE_NOTED
    return EventType.FILE_SENT if (row.data or {}).get("file_path") else EventType.MESSAGE_SENT


def turn_started(first: Round) -> NewEvent:
    """Return the event of a new turn."""
    return NewEvent(
        type=EventType.TURN_STARTED,
        turn_id=first.turn_id,
        data={
            "cause": {"kind": first.trigger_kind.value, "id": first.trigger_id},
            "user_id": first.user_id,
        },
    )


def round_started(claimed: ClaimedRound) -> NewEvent:
    """Return the event of an attempt at a round."""
    item = claimed.round
    data = {
        "number": item.number,
        "attempt": item.attempt,
        "worker": item.worker,
        "cause": {"kind": item.trigger_kind.value, "id": item.trigger_id},
        "merged": [{"round_id": other.id, "turn_id": other.turn_id} for other in claimed.merged],
    }
    return NewEvent(type=EventType.ROUND_STARTED, turn_id=item.turn_id, round_id=item.id, data=data)


def round_ended(item: Round) -> NewEvent:
    """Return the event of the end of a round that was started."""
    data = {
        "number": item.number,
        "state": item.state.value,
        "stop_type": None if item.stop_type is None else StopType(item.stop_type).name,
        "exit_code": item.exit_code,
        "output": _cut(item.output or ""),
        "prompt_tokens": item.prompt_tokens,
        "completion_tokens": item.completion_tokens,
        "tokens_estimated": bool(item.tokens_estimated),
        "cost": item.cost,
        "worker": item.worker,
        "error": item.error,
    }
    return NewEvent(type=EventType.ROUND_ENDED, turn_id=item.turn_id, round_id=item.id, data=data)


def _cut(output: str) -> str:
    half = _OUTPUT_CHARS // 2
    return output if len(output) <= _OUTPUT_CHARS else f"{output[:half]}\n…\n{output[-half:]}"


async def record_caused(
    transaction: Transaction,
    publisher: EventPublisher,
    chat_key: str,
    event: NewEvent,
    *,
    later: bool = False,
) -> None:
    """Append what a call may have caused, after the call: it may have to wait for the call's event.

    The transaction must have locked the chat. ``nekro.app.rounds.events`` appends calls.

    Args:
        later: as of ``record``.
    """
    if not await transaction.events.hold_back(chat_key, event):
        record(transaction, publisher, chat_key, event, later=later)


async def record_job(transaction: Transaction, publisher: EventPublisher, kind: EventType, job: Job) -> None:
    """Add an event of a background job or detached call in its current state; none for a job of no chat."""
    if not job.chat_key:
        return
    with suppress(NotFoundError):  # readers of a chat without a row do not exist
        await transaction.chats.lock(job.chat_key)
        await record_caused(transaction, publisher, job.chat_key, _job_event(kind, job))


def _job_event(kind: EventType, job: Job) -> NewEvent:
    return NewEvent(
        type=kind,
        turn_id=job.turn_id,
        round_id=job.round_id,
        call_id=job.call_id,
        data={
            "job_id": job.id,
            "type": job.type,
            "task_id": job.task_id,
            "plugin": job.plugin_key,
            "state": job.state.value,
            "percent": job.percent,
            "message": job.message,
        },
    )
