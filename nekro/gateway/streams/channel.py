"""One chat's events in this process: the newest ones in a ring, shared by all of the chat's readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from nekro.gateway.streams.events import Position, StreamEvent

__all__ = ["RING", "Channel", "Reader"]

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


class Channel:
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
        self._begin = newest
        #: Number of the newest event that was announced.
        self.announced = newest.number
        #: Number of the last event that still counts, when the database has lost later ones; None before.
        self.lost_after: int | None = None
        #: The task that reads rows, while one does.
        self.reading: asyncio.Task[None] | None = None

    def has(self, position: int) -> bool:
        """Whether everything after ``position`` that was read is still in the ring."""
        return position >= self.newest - len(self._ring)

    def after(self, position: int) -> Sequence[StreamEvent]:
        """Return the events of the ring after ``position``, for which ``has`` is true."""
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

    def _mark_of(self, number: int) -> str | None:
        event = self.find(number)
        if event is None:
            return self._begin.mark if number == self._begin.number else None
        return event.mark

    def find(self, number: int) -> StreamEvent | None:
        """Return an event of the ring."""
        at = number - self.oldest - 1
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def lose(self, kept: Iterable[tuple[int, str | None]]) -> None:
        """End the streams of all readers: the database has lost events of the ring.

        Args:
            kept: numbers and marks of the events that it has, from ``oldest`` on; if none of them is known
                here, no event counts.
        """
        agreed = (number for number, mark in kept if mark is not None and mark == self._mark_of(number))
        self.lost_after = max(agreed, default=0)
        self.wake()

    def wake(self) -> None:
        """Wake all readers."""
        for reader in self.readers:
            reader.wake()
