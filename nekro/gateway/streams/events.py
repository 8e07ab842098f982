"""Events in the vocabulary of the API, and their text, which all readers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from nekro.gateway.web.json_text import json_text
from nekro_agent.shared_clock import shared_time
from nekro_client.models import Event, EventType
from storage.repositories.events import ChatEvent

__all__ = ["LIVE_TYPES", "Position", "StreamEvent", "live_event", "lost_frame", "mark_of", "stream_event"]

#: Types of events that are not kept.
LIVE_TYPES: Final = frozenset(
    {EventType.MESSAGE_DELTA, EventType.MODEL_DELTA, EventType.OUTPUT_CHUNK, EventType.CALL_PROGRESS}
)


@dataclass(frozen=True)
class Position:
    """The last event that a reader has, as the ``id:`` of a stream names it: ``17`` or ``17.5e0a92c1``."""

    #: 0: none.
    number: int
    #: See ``mark_of``; None: unknown.
    mark: str | None = None

    def __str__(self) -> str:
        return str(self.number) if self.mark is None else f"{self.number}.{self.mark}"


def mark_of(at: datetime | None) -> str | None:
    """Return what distinguishes an event from another one with its number; None if its time is not known.

    A database that fails over without its last transactions gives their numbers again. Such events have
    other times.
    """
    return None if at is None else f"{round(at.timestamp() * 1_000_000) & 0xFFFFFFFF:08x}"


def lost_frame(chat_key: str, after: int) -> bytes:
    """Return the last server-sent event of a reader that has events which the database has lost.

    Args:
        after: number of the last event that the reader has and that still counts; it resumes there.
    """
    data = {"after": after}
    event = Event(type=EventType.EVENTS_LOST, chat_key=chat_key, at=shared_time(), data=data)
    return f"id: {after}\r\nevent: {event.type}\r\ndata: {json_text(event)}\r\n\r\n".encode()


class StreamEvent:
    """An event and its JSON, which is written once for all readers."""

    def __init__(self, event: Event) -> None:
        self.event = event

    @property
    def number(self) -> int | None:
        """Its number; None for a live event."""
        return self.event.number

    @cached_property
    def mark(self) -> str | None:
        """See ``mark_of``."""
        return mark_of(self.event.at)

    @cached_property
    def chars(self) -> int:
        """Length of its texts."""
        return sum(len(value) for value in self.event.data.values() if isinstance(value, str))

    @cached_property
    def json(self) -> str:
        """The event as a response has it."""
        return json_text(self.event)

    @cached_property
    def frame(self) -> bytes:
        """The event as a server-sent event; JSON has no line ends of its own."""
        number = "" if self.number is None else f"id: {Position(self.number, self.mark)}\r\n"
        return f"{number}event: {self.event.type}\r\ndata: {self.json}\r\n\r\n".encode()


def stream_event(row: ChatEvent) -> StreamEvent:
    """Return a kept event."""
    return StreamEvent(
        Event.model_construct(
            number=row.number,
            type=row.type,
            chat_key=row.chat_key,
            at=row.created_at,
            turn_id=row.turn_id,
            round_id=row.round_id,
            call_id=row.call_id,
            message_id=row.message_id,
            data=row.data,
        )
    )


def live_event(body: Mapping[str, Any]) -> StreamEvent | None:
    """Return a live event that another process published; None if it is not one that we know.

    Processes of another release may publish other types and fields.
    """
    if body.get("type") not in LIVE_TYPES or not isinstance(body.get("data"), dict):
        return None
    ids = {name: body.get(name) for name in ("turn_id", "round_id", "call_id")}
    if any(value is not None and not isinstance(value, str) for value in ids.values()):
        return None
    try:
        at = datetime.fromisoformat(str(body.get("at")))
    except ValueError:
        at = shared_time()
    event = Event(type=str(body["type"]), chat_key=str(body["chat_key"]), at=at, data=body["data"], **ids)
    return StreamEvent(event)
