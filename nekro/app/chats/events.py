"""The one writer of chats' events, in the transaction that makes the change; and live events, which are not
kept.

Events are announced after the commit. The announcement names the chat, the newest number and the types of the
events; subscribers read the rows. A lost announcement delays a reader until it looks by itself.

Live text is a model's answer or a program's output in pieces at a bounded rate. Each piece carries the offset
of its text, so a reader notices what was dropped; the whole text follows in a kept event. A text may also be
repeated from its beginning, for readers that come while it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from nekro.sandbox.models import StopType
from nekro_agent.durations import FRESH_SECONDS, REFRESH_SECONDS
from nekro_agent.errors import NotFoundError
from nekro_agent.ports import MessageKind
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import EventType
from storage.repositories.events import NewEvent
from storage.repositories.jobs import Job
from storage.repositories.messages import Message
from storage.repositories.rounds import ClaimedRound, Round
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = [
    "LiveText",
    "live_event",
    "message_event",
    "record",
    "record_caused",
    "record_job",
    "round_ended",
    "round_started",
    "turn_started",
]


#: Parts of a message's data that its event repeats: of its file, and of the question that it asks.
_DATA_FIELDS: Final = (
    "file_path",
    "file_name",
    "file_kind",
    "media_type",
    "reply_to",
    "question",
    "choices",
)
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
        **{name: data.get(name) for name in _DATA_FIELDS},
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
    if item.resumes and item.attempt > 1:
        again = {"number": item.number, "attempt": item.attempt, "worker": item.worker}
        return NewEvent(type=EventType.PROGRAM_RESUMED, turn_id=item.turn_id, round_id=item.id, data=again)
    data = {
        "number": item.number,
        "attempt": item.attempt,
        "worker": item.worker,
        "cause": {"kind": item.trigger_kind.value, "id": item.trigger_id},
        "program_of": item.program_id,
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

    The transaction must have locked the chat. ``workers.rounds.attempt_events`` appends calls.

    Args:
        later: see ``record``.
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


#: Characters of one event. A program that prints faster than this per interval is shown with gaps.
_MOST_CHARS: Final = 8_000


def live_event(kind: EventType, data: Mapping[str, Any], **ids: str | None) -> dict[str, Any]:
    """Return an event for ``EventPublisher.live``.

    Args:
        ids: ``turn_id``, ``round_id`` and ``call_id``, as far as it has them.
    """
    return {"type": kind.value, "at": shared_time().isoformat(), **ids, "data": data}


class LiveText:
    """One growing text; used on one event loop."""

    def __init__(
        self,
        publish: Callable[[dict[str, Any]], object],
        *,
        seconds: float = REFRESH_SECONDS / 3,
        repeats: bool = False,
    ) -> None:
        """Create it.

        Args:
            publish: receives ``{"offset", "text"}`` and what ``begin`` was given; must not block.
            seconds: least time between two events.
            repeats: publish the whole text every ``FRESH_SECONDS`` while it grows and fits into one event.
        """
        self._publish = publish
        self._seconds = seconds
        self._fields: Mapping[str, Any] = {}
        self._pieces: list[str] = []
        self._chars = 0
        self._offset = 0
        self._timer: asyncio.TimerHandle | None = None
        #: The whole text, if it is repeated, and when it is next.
        self._whole: list[str] | None = [] if repeats else None
        self._repeat_at = 0.0

    def begin(self, fields: Mapping[str, Any]) -> None:
        """Begin another text, whose events carry these fields."""
        self.flush()
        self._fields, self._offset = fields, 0

    def add(self, text: str) -> None:
        """Append a piece: published at once, or with others when the least time is over."""
        if self._chars < _MOST_CHARS:
            self._pieces.append(text[: _MOST_CHARS - self._chars])
        self._chars += len(text)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._due)
            self._send()

    def flush(self) -> None:
        """Publish what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send()

    def _due(self) -> None:
        self._timer = None
        if self._chars:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._due)
            self._send()

    def _send(self) -> None:
        if not self._chars:
            return
        offset, text = self._offset, "".join(self._pieces)
        self._offset += self._chars
        if self._whole is not None:
            offset, text = self._repeated(offset, text, time.monotonic())
        self._publish({**self._fields, "offset": offset, "text": text})
        self._pieces.clear()
        self._chars = 0

    def _repeated(self, offset: int, text: str, now: float) -> tuple[int, str]:
        """Return the next event's offset and text: the whole text if it is time for it."""
        if self._offset > _MOST_CHARS or self._whole is None:
            self._whole = None
            return offset, text
        self._whole.append(text)
        if now < self._repeat_at:
            return offset, text
        self._repeat_at = now + FRESH_SECONDS
        return 0, "".join(self._whole)
