"""Bodies of answers over HTTP: JSON or events, whatever their header says, as events that the SDK reads."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx2
from mcp_types import INTERNAL_ERROR

from nekro.extensions.mcp.client.messages import messages_of, request_id_of
from nekro_agent.durations import DEFER_SECONDS

__all__ = [
    "AnswerStream",
    "Bounded",
    "EventReader",
    "Events",
    "Fate",
    "ServerSentEvent",
    "TooLargeError",
    "error_of",
]

#: Bytes of an answer that are read at once; then the loop gets time for others.
_BURST_BYTES: Final = 1 << 20
_BLANK: Final = b" \t\r\n\x00\xef\xbb\xbf"
_BREAK: Final = re.compile(rb"\r\n|\n|\r")
_FIELD: Final = re.compile(rb":|(?:data|event|id|retry)\b")
_MOST_EXCERPT_CHARS: Final = 200


class Fate:
    """Data of errors that say what became of a request; a server's own error has none of them."""

    #: The server did not receive it.
    NOT_SENT: Final = "nekro.not_sent"
    #: The server refused it, because it does not accept the headers.
    DENIED: Final = "nekro.denied"
    #: The server refused it, because it does not know the session.
    NO_SESSION: Final = "nekro.no_session"
    #: The server answered with an error that a lost session may have caused.
    DOUBTFUL: Final = "nekro.doubtful"
    #: It is unknown whether the server ran it.
    UNKNOWN: Final = "nekro.unknown"


class TooLargeError(httpx2.StreamError):
    """An answer exceeds the limit."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(f"its answer has more than {most_bytes} bytes, the limit of messages")


@dataclass(frozen=True, kw_only=True)
class ServerSentEvent:
    """One server-sent event, without its name: servers give messages any."""

    id: bytes | None
    retry: bytes | None
    data: bytes


class EventReader:
    """Splits a stream into events; lines may end with CR, LF or both."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._id: bytes | None = None
        self._retry: bytes | None = None
        self._ends_with_cr = False

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that a chunk completes.

        Raises:
            TooLargeError: an event has more bytes than the limit.
        """
        if self._ends_with_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._ends_with_cr = chunk.endswith(b"\r")
        *complete, rest = _BREAK.split(chunk)
        for part in complete:
            self._add(part)
            yield from self._end_line()
        self._add(rest)

    def finish(self) -> Iterator[ServerSentEvent]:
        """Yield the event that the end of the stream completes."""
        yield from self._end_line()
        yield from self._end_event()

    def _add(self, part: bytes) -> None:
        self._line += part
        self._size += len(part)
        if self._size > self._most_bytes:
            raise TooLargeError(self._most_bytes)

    def _end_line(self) -> Iterator[ServerSentEvent]:
        line = bytes(self._line)
        self._line.clear()
        if not line:
            yield from self._end_event()
            return
        if line[:1] in (b"{", b"["):  # a message without a name of a field
            self._data.append(line)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name.lstrip(b"\xef\xbb\xbf") == b"data":
            self._data.append(value)
        else:
            self._size -= len(line)
            if name == b"id" and b"\x00" not in value:
                self._id = value[:1_000]
            elif name == b"retry" and value.isdigit():
                self._retry = value[:9]

    def _end_event(self) -> Iterator[ServerSentEvent]:
        if self._data or self._id is not None or self._retry is not None:
            yield ServerSentEvent(id=self._id, retry=self._retry, data=b"\n".join(self._data))
        self._data, self._id, self._retry, self._size = [], None, None, 0


class Bounded(httpx2.AsyncByteStream):
    """Passes on a body of at most so many bytes, and pauses so that a flood leaves the loop to others."""

    def __init__(self, inner: httpx2.AsyncByteStream, most_bytes: int | None) -> None:
        self._inner, self._most_bytes = inner, most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = burst = 0
        async for chunk in self._inner:
            total, burst = total + len(chunk), burst + len(chunk)
            if self._most_bytes is not None and total > self._most_bytes:
                raise TooLargeError(self._most_bytes)
            if burst >= _BURST_BYTES:
                burst = 0
                await asyncio.sleep(DEFER_SECONDS)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class Events(httpx2.AsyncByteStream):
    """A stream of events that belongs to no request, with readable messages only."""

    def __init__(self, inner: httpx2.AsyncByteStream, most_bytes: int) -> None:
        self._inner = Bounded(inner, None)
        self._most_bytes = most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reader = EventReader(self._most_bytes)
        async for chunk in self._inner:
            for event in reader.feed(chunk):
                yield _written(event, messages_of(event.data))
        for event in reader.finish():
            yield _written(event, messages_of(event.data))

    async def aclose(self) -> None:
        await self._inner.aclose()


class AnswerStream(httpx2.AsyncByteStream):
    """The answer to one request as a stream of events, which ends with exactly its own."""

    def __init__(
        self,
        inner: httpx2.AsyncByteStream,
        *,
        request_id: int | str,
        kind: str,
        most_bytes: int,
        is_of_another: Callable[[int | str], bool],
        on_end: Callable[[bool], None],
    ) -> None:
        """
        Args:
            kind: what the header says; shown in errors.
            is_of_another: whether another request of the session has, or had, an id.
            on_end: called when the answer is closed, with whether it was complete.
        """
        self._inner, self._id, self._kind = Bounded(inner, None), request_id, kind
        self._most_bytes, self._is_of_another, self._on_end = most_bytes, is_of_another, on_end
        #: Answers with the id of no request. A single one counts if no other answer comes: some servers
        #: always write the same id.
        self._strays: list[dict[str, Any]] = []
        self._is_answered = self._is_for_another = False
        #: Whether the SDK may ask for the rest of the stream.
        self._can_resume = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._read():
                yield part
                if self._is_answered:
                    return
        except TooLargeError as exc:
            yield _data(error_of(self._id, str(exc), None))
            return
        if len(self._strays) == 1 and not self._can_resume:
            yield _data({**self._strays[0], "id": self._id})

    async def aclose(self) -> None:
        self._on_end(self._is_answered)
        await self._inner.aclose()

    async def _read(self) -> AsyncIterator[bytes]:
        reader: EventReader | None = None
        body = bytearray()
        async for chunk in self._inner:
            if reader is not None:
                for event in reader.feed(chunk):
                    yield self._own(event)
                continue
            body += chunk
            begin = bytes(body[:64]).lstrip(_BLANK)
            if len(begin) > 8 and _FIELD.match(begin):
                reader = EventReader(self._most_bytes)
                for event in reader.feed(bytes(body).lstrip(_BLANK)):
                    yield self._own(event)
                body.clear()
            if len(body) > self._most_bytes:
                raise TooLargeError(self._most_bytes)
        if reader is None and _FIELD.match(bytes(body).lstrip(_BLANK)):
            reader = EventReader(self._most_bytes)
            for event in reader.feed(bytes(body).lstrip(_BLANK)):
                yield self._own(event)
        if reader is not None:
            for event in reader.finish():
                yield self._own(event)
            return
        yield self._own(ServerSentEvent(id=None, retry=None, data=bytes(body)))
        if not self._is_answered and not self._strays:
            yield _data(error_of(self._id, self._unreadable(bytes(body)), Fate.UNKNOWN))

    def _own(self, event: ServerSentEvent) -> bytes:
        """Return an event without what is not for this request."""
        self._can_resume |= event.id is not None
        passed: list[dict[str, Any]] = []
        for message in messages_of(event.data):
            if "method" in message:
                passed.append(message)
                continue
            found = message["id"]
            if found is None or found == request_id_of(self._id):
                passed.append({**message, "id": self._id})
                self._is_answered = True
                break
            if self._is_of_another(found):
                self._is_for_another = True
            elif len(self._strays) < 2:
                self._strays.append(message)
        return _written(event, passed)

    def _unreadable(self, body: bytes) -> str:
        if self._is_for_another:
            return "it answered with the id of another request"
        if not body.strip(_BLANK):
            return "its answer is empty"
        excerpt = body[: 4 * _MOST_EXCERPT_CHARS].decode("utf-8", "replace")[:_MOST_EXCERPT_CHARS]
        return f"its answer ({self._kind or 'of no declared type'}) is not a message: {excerpt!r}"


def error_of(
    request_id: int | str | None, text: str, data: Any, *, code: int = INTERNAL_ERROR
) -> dict[str, Any]:
    """Return a message that says that a request failed."""
    return {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": text, "data": data}}


def _data(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def _written(event: ServerSentEvent, messages: list[dict[str, Any]]) -> bytes:
    """Return messages as events; the id and the pause of the event they came with are kept."""
    head = b"" if event.id is None else b"id: " + event.id + b"\n"
    head += b"" if event.retry is None else b"retry: " + event.retry + b"\n"
    if not messages:
        return head + b"data:\n\n" if head else b""
    return b"".join((head if number == 0 else b"") + _data(one) for number, one in enumerate(messages))
