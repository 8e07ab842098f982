"""Positions in streams of events and changes over any number of connections, and waits on such streams."""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from nekro_client.errors import ApiError, ClientError, InvalidAnswerError, UnreachableError, WaitTimeoutError
from nekro_client.models import Change, Event, EventType, Turn, TurnState
from nekro_client.operations import API, CONNECT_SECONDS, Delay, failure_of, is_passing, parsed_json, segment
from nekro_client.sse import EventParser, EventTooLargeError, ServerEvent

__all__ = [
    "STREAM_TIMEOUT",
    "ChangeCursor",
    "EventCursor",
    "StreamCursor",
    "TurnWait",
    "require_stream",
]

T = TypeVar("T", bound=BaseModel)

#: The gateway sends a comment every 15 s; after three missing ones the connection is dead.
_READ_SECONDS: Final = 45.0
STREAM_TIMEOUT: Final = httpx.Timeout(_READ_SECONDS, connect=CONNECT_SECONDS)
#: How late the end of a stream's time may be noticed.
_LATE_SECONDS: Final = 1.0
_ENDED: Final = frozenset({TurnState.DONE, TurnState.FAILED, TurnState.CANCELLED})
#: How long the gateway may be out of reach while a turn is awaited, as for other streams.
_GIVE_UP_SECONDS: Final = 300.0
#: After a connection that lasted this long, the delays begin again with the first.
_GOOD_SECONDS: Final = 5.0


class StreamCursor(ABC, Generic[T]):
    """A reader's wait for a stream over any number of connections, of any kind of stream."""

    def __init__(self, path: str, *, give_up_seconds: float | None, seconds: float | None = None) -> None:
        """Begin.

        Args:
            give_up_seconds: how long the gateway may be out of reach; None means for ever.
            seconds: how long to read; None means without end.
        """
        self.path = path
        self._ends_at = None if seconds is None else time.monotonic() + seconds
        self._read_seconds = _READ_SECONDS
        #: The ``id`` of the last event, as the stream named it; "" before the first one.
        self._last_id = ""
        self._give_up_seconds = give_up_seconds
        self._delay = Delay()
        self._opened_at = self._heard_at = time.monotonic()
        self._parser = EventParser()

    def connect(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Begin a connection; returns the parameters and headers of its request."""
        self._parser = EventParser()
        self._opened_at = time.monotonic()
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if "." in self._last_id:  # a chat's ids show also whether the event was lost
            headers["last-event-id"] = self._last_id
        return {}, headers

    @abstractmethod
    def take(self, chunk: bytes) -> Iterator[T]:
        """Yield what a chunk completes.

        Raises:
            InvalidAnswerError: the stream has something else.
        """

    @property
    def is_over(self) -> bool:
        """Whether the time to read is over."""
        return self._left() <= 0

    @property
    def is_late(self) -> bool:
        """Whether the present connection might notice the end of the time too late."""
        return self._left() < self._read_seconds - _LATE_SECONDS

    def timeout(self) -> httpx.Timeout:
        """Return the limits of a connection that begins now."""
        self._read_seconds = min(_READ_SECONDS, max(self._left(), 0.0))
        return httpx.Timeout(self._read_seconds, connect=STREAM_TIMEOUT.connect)

    def _left(self) -> float:
        return math.inf if self._ends_at is None else self._ends_at - time.monotonic()

    def accept(self, response: httpx.Response) -> None:
        """Check the head of an answer; the body of an error must have been read.

        Raises:
            ApiError: the gateway refuses the stream.
            InvalidAnswerError: it is not an event stream.
        """
        failure = failure_of(response)
        if failure is not None:
            raise failure
        require_stream(response)

    def _sent(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Yield the server-sent events that a chunk completes; each is remembered as the last one.

        Raises:
            InvalidAnswerError: the stream, or what the caller makes of an event, is not one of a gateway.
        """
        self._heard_at = time.monotonic()
        try:
            for sent in self._parser.feed(chunk):
                self._last_id = sent.last_id or self._last_id
                yield sent
        except EventTooLargeError as exc:
            raise InvalidAnswerError(f"{self.path} returned an invalid event: {exc}") from exc
        # A reader that began without a position learns it before the first event.
        self._last_id = self._parser.last_id or self._last_id

    def _parsed(self, model: type[T], sent: ServerEvent) -> T:
        try:
            return parsed_json(sent.data, model.model_validate_json, model.model_validate)
        except ValidationError as exc:
            raise InvalidAnswerError(f"{self.path} returned an invalid event: {exc}") from exc

    def _connected(self) -> None:
        """Reset the delay after an event, so that a lost connection is made again soon."""
        self._delay.reset()

    def delay_after(self, error: ClientError | None) -> float:
        """Return the seconds to wait before the next connection.

        Args:
            error: what ended the last one; None: the gateway closed it.

        Raises:
            ClientError: ``error``, because another connection would not help, or the gateway has been out of
                reach too long.
        """
        now = time.monotonic()
        if error is not None and not is_passing(error):
            raise error
        if now - self._opened_at >= _GOOD_SECONDS and error is None:
            self._delay.reset()
        if self._give_up_seconds is not None and now - self._heard_at > self._give_up_seconds:
            raise error or UnreachableError(f"{self.path}: the stream ends without an event, again and again")
        stated = error.retry_after_seconds if isinstance(error, ApiError) else None
        # Readers that a restart cut off come back at different moments.
        delay = max(stated or 0.0, self._delay.take() * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
        return min(delay, max(self._left(), 0.0))


class EventCursor(StreamCursor[Event]):
    """Position of a reader: asks each connection for what follows, and drops what came already."""

    def __init__(
        self,
        chat_key: str,
        *,
        after: int | None,
        give_up_seconds: float | None,
        live: bool = True,
        types: Collection[str] = (),
        seconds: float | None = None,
    ) -> None:
        """Begin after an event.

        Args:
            after: number of the last event that the reader has; 0 means none, so that all kept events come;
                None means only those that happen from now on.
            live: whether to ask for events that are not kept.
            give_up_seconds: how long the gateway may be out of reach; None means for ever.
            types: of the events to ask for; () means all.
            seconds: how long to read; None means without end.
        """
        path = f"{API}/chats/{segment(chat_key)}/events"
        super().__init__(path, give_up_seconds=give_up_seconds, seconds=seconds)
        self._types = ",".join(types)
        self.last_number = after
        self._live = live

    def connect(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Begin a connection; returns the parameters and headers of its request."""
        _, headers = super().connect()
        params = {} if self._live else {"live": "false"}
        if self._types:
            params["types"] = self._types
        if self.last_number is not None:
            params["after"] = str(self.last_number)
        return params, headers

    def take(self, chunk: bytes) -> Iterator[Event]:
        """Yield the new events that a chunk completes.

        Raises:
            InvalidAnswerError: the stream has something else than events.
        """
        for sent in self._sent(chunk):
            event = self._parsed(Event, sent)
            if event.type == EventType.EVENTS_LOST:
                self.last_number = self._lost_after(event)
            if event.number is not None:
                if self.last_number is not None and event.number <= self.last_number:
                    continue
                self.last_number = event.number
            self._connected()
            yield event
        number = self._last_id.partition(".")[0]
        if self.last_number is None and number.isascii() and number.isdigit() and len(number) < 20:
            self.last_number = int(number)

    def _lost_after(self, event: Event) -> int:
        try:
            return int(event.data["after"])
        except (LookupError, TypeError, ValueError) as exc:
            raise InvalidAnswerError(f"{self.path} returned an invalid event: {exc}") from exc


class ChangeCursor(StreamCursor[Change]):
    """Position of a reader of changes."""

    def __init__(self, *, give_up_seconds: float | None) -> None:
        """Begin with what changes from now on."""
        super().__init__(f"{API}/changes", give_up_seconds=give_up_seconds)

    def take(self, chunk: bytes) -> Iterator[Change]:
        """Yield the hints that a chunk completes.

        Raises:
            InvalidAnswerError: the stream has something else than hints.
        """
        for sent in self._sent(chunk):
            change = self._parsed(Change, sent)
            self._connected()
            yield change


def require_stream(response: httpx.Response) -> None:
    """Return if an answer is an event stream.

    Raises:
        InvalidAnswerError: it is not.
    """
    kind = response.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise InvalidAnswerError(
            f"{response.url.path} returned {kind or 'no content type'} instead of an event stream"
        )


class TurnWait:
    """The wait for one turn.

    The position of the chat's events is asked for before the turn is read a second time, so the end of a turn
    that has not ended then is among the events after that position.
    """

    def __init__(self, turn_id: str, *, timeout_seconds: float | None) -> None:
        """Begin to wait; None waits without end."""
        self.turn_id = turn_id
        self._timeout_seconds = timeout_seconds
        self._began = time.monotonic()
        #: Number of the last event before the turn was read; None while it is not known.
        self.position: int | None = None

    def is_over(self, turn: Turn) -> bool:
        """Whether the turn has ended, or waits for the decision of a person or for something else.

        Raises:
            WaitTimeoutError: it has not, and the time is over.
        """
        if turn.state in _ENDED or turn.waits_for or turn.waits:
            return True
        left = self._left()
        if left is not None and left <= 0:
            raise WaitTimeoutError(f"turn {self.turn_id} is {turn.state} after {self._timeout_seconds:g} s")
        return False

    def cursor(self, turn: Turn) -> EventCursor:
        """Return the cursor that reads ends of turns after the position, until the time is over."""
        return EventCursor(
            turn.chat_key,
            after=self.position,
            live=False,
            types=(EventType.TURN_ENDED,),
            give_up_seconds=_GIVE_UP_SECONDS,
            seconds=self._left(),
        )

    def _left(self) -> float | None:
        if self._timeout_seconds is None:
            return None
        return self._began + self._timeout_seconds - time.monotonic()
