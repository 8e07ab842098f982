"""Events in the vocabulary of the API, and the newest ones of one chat in this process.

Their text and the ring that holds them are shared by all of the chat's readers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, Final

from nekro.wire.plain_json import json_text
from nekro_agent.shared_clock import shared_time
from nekro_client.models import Event, EventType
from storage.repositories.events import ChatEvent

__all__ = [
    "LIVE_TYPES",
    "RING",
    "ChatRing",
    "Position",
    "Reader",
    "StreamEvent",
    "live_event",
    "lost_event",
    "lost_frame",
    "mark_of",
    "stream_event",
]


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


def lost_event(chat_key: str) -> Event:
    """Return the last event of a reader that may have events which the database has lost.

    The reader resumes after number 0: no event that it has counts.
    """
    return Event(type=EventType.EVENTS_LOST, chat_key=chat_key, at=shared_time(), data={"after": 0})


def lost_frame(chat_key: str) -> bytes:
    """Return ``lost_event`` as a server-sent event."""
    event = lost_event(chat_key)
    return f"id: 0\r\nevent: {event.type}\r\ndata: {json_text(event)}\r\n\r\n".encode()


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


#: Newest events of a chat that are kept in memory; a reader that is further behind is too slow.
RING: Final = 1_000
#: Most characters of the texts of these events.
_RING_CHARS: Final = 8 << 20
#: Live events that wait for one reader; of more the oldest are dropped.
_MOST_LIVE: Final = 50


class Reader:
    """One reader's position in a chat, and the live events that wait for it."""

    def __init__(self, *, position: int) -> None:
        """Start after the event with the number ``position``."""
        self.position = position
        #: Whether it has read everything before the ring.
        self.has_reached_ring = False
        self.live: deque[StreamEvent] = deque(maxlen=_MOST_LIVE)
        self._woken = asyncio.Event()
        #: Whether its stream must end.
        self.is_ended = False

    def end(self) -> None:
        """Let the reader's stream end."""
        self.is_ended = True
        self.wake()

    def add_live(self, event: StreamEvent) -> None:
        """Give the reader a live event."""
        self.live.append(event)
        self.wake()

    def wake(self) -> None:
        """Wake the reader: there are events."""
        self._woken.set()

    async def wait(self) -> None:
        """Wait for ``wake``, which may have been called since the last wait."""
        await self._woken.wait()
        self._woken.clear()


class ChatRing:
    """The ring of one chat with readers."""

    def __init__(self, chat_key: str, *, newest: Position) -> None:
        """Start with an empty ring after the event ``newest``."""
        self.chat_key = chat_key
        self.readers: set[Reader] = set()
        self._ring: deque[StreamEvent] = deque()
        #: Characters of its texts.
        self._chars = 0
        #: Number of the newest event that was read.
        self.newest = newest.number
        #: The mark of that event; None: unknown.
        self.mark = newest.mark
        #: Number of the newest event that was announced.
        self.announced = newest.number
        #: Whether the database has lost events of the ring.
        self.is_lost = False
        #: The task that reads rows, while one does.
        self.reading: asyncio.Task[None] | None = None

    def has(self, position: int) -> bool:
        """Whether everything after ``position`` that was read is still in the ring."""
        return position >= self.newest - len(self._ring)

    def after(self, position: int) -> Sequence[StreamEvent]:
        """Return the events of the ring after ``position`` that ``has`` accepts."""
        missing = self.newest - position
        return list(islice(self._ring, max(0, len(self._ring) - missing), None)) if missing > 0 else ()

    def add(self, events: Sequence[tuple[int, StreamEvent]]) -> None:
        """Append the events that follow ``newest``, and wake the readers."""
        for number, event in events:
            if number != self.newest + 1:
                # Retention deleted what is between: the ring must stay without gaps.
                self._ring.clear()
                self._chars = 0
            self._ring.append(event)
            self._chars += event.chars
            while len(self._ring) > RING or (self._chars > _RING_CHARS and len(self._ring) > 1):
                self._chars -= self._ring.popleft().chars
            self.newest, self.mark = number, event.mark
        self.announced = max(self.announced, self.newest)
        self.wake()

    @property
    def oldest(self) -> int:
        """Number of the event before the ring."""
        return self.newest - len(self._ring)

    def find(self, number: int) -> StreamEvent | None:
        """Return an event of the ring."""
        at = number - self.oldest - 1
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def wake(self) -> None:
        """Wake all readers."""
        for reader in self.readers:
            reader.wake()
