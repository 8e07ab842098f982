"""Parser of server-sent events, and of words that such events carry in pieces.

Source of the parser: the section "Server-sent events" of the HTML standard (WHATWG).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nekro_client.models import Event, EventType

__all__ = ["EventParser", "EventTooLargeError", "LiveMessage", "ServerEvent", "is_restart"]

#: Largest event in characters; a stream that exceeds it is not one of a gateway.
MAX_CHARACTERS = 64 * 1024 * 1024


class EventTooLargeError(Exception):
    """A line or an event of the stream is larger than a gateway sends."""


@dataclass(frozen=True, kw_only=True)
class ServerEvent:
    """One event of a stream."""

    #: "message" if the stream names no type.
    type: str
    data: str
    #: The last id that the stream named, by this event or an earlier one; "" if none.
    last_id: str


class EventParser:
    """Turns the bytes of one connection into events; an event that the end of the stream cuts is dropped."""

    def __init__(self) -> None:
        """Begin a stream."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line: list[str] = []
        self._line_size = 0
        self._has_return = False
        self._is_first = True
        self._type = ""
        self._data: list[str] = []
        self._data_size = 0
        self._id = ""
        #: Id that takes effect with the end of the event.
        self.last_id = ""

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Yield the events that ``chunk`` completes.

        Raises:
            EventTooLargeError: a line or an event is too large.
        """
        text = self._decoder.decode(chunk)
        if self._is_first and text:
            self._is_first = False
            text = text.removeprefix("\ufeff")
        if self._has_return and text:
            # The \n of a \r\n that two chunks share.
            self._has_return = False
            text = text.removeprefix("\n")
        self._has_return = text.endswith("\r") if text else self._has_return
        # Only \r\n, \n and \r end lines; ``str.splitlines`` knows more.
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            self._line.append(line)
            whole, self._line, self._line_size = "".join(self._line), [], 0
            event = self._take(whole)
            if event is not None:
                yield event
        if rest:
            self._line.append(rest)
            self._line_size += len(rest)
            self._require(self._line_size)

    def _take(self, line: str) -> ServerEvent | None:
        if not line:
            return self._end()
        field, colon, value = line.partition(":")
        if colon and not field:
            return None  # a comment
        value = value.removeprefix(" ")
        if field == "event":
            self._type = value
        elif field == "data":
            self._data.append(value)
            self._data_size += len(value) + 1
            self._require(self._data_size)
        elif field == "id" and "\0" not in value:
            self._id = value
        return None

    def _end(self) -> ServerEvent | None:
        kind, data = self._type or "message", self._data
        self.last_id = self._id
        self._type, self._data, self._data_size = "", [], 0
        return ServerEvent(type=kind, data="\n".join(data), last_id=self.last_id) if data else None

    @staticmethod
    def _require(size: int) -> None:
        if size > MAX_CHARACTERS:
            raise EventTooLargeError(f"an event of the stream has more than {MAX_CHARACTERS} characters")


def is_restart(event: Event) -> bool:
    """Whether a round begins again, because its worker died: it writes its message anew.

    Its first beginning may be heard after its first words: live events are faster than kept ones.
    """
    attempt = event.data.get("attempt")
    return event.type == EventType.ROUND_STARTED and isinstance(attempt, int) and attempt > 1


class LiveMessage:
    """The words of a message that a model still writes, put together from the events of its round.

    Live events are not kept and may be missing, late, or of an attempt at a round that is over. What is taken
    from them only grows until a kept event says what became of it. Rounds of a chat run one at a time.
    """

    def __init__(self) -> None:
        #: The round that writes it; None: none does.
        self.round_id: str | None = None
        self.text = ""
        #: Rounds whose late events count no more.
        self._settled: set[str] = set()

    def add(self, round_id: str | None, data: Mapping[str, Any]) -> str:
        """Take a piece; return the words that the message gains, none if earlier ones are missing."""
        offset, text = data.get("offset"), data.get("text")
        is_other = self.round_id is not None and round_id != self.round_id
        if round_id is None or round_id in self._settled or is_other:
            return ""
        if not (isinstance(offset, int) and isinstance(text, str) and 0 <= offset <= len(self.text)):
            return ""
        known = self.text[offset : offset + len(text)]
        if not text.startswith(known):  # of another attempt
            return ""
        new = text[len(known) :]
        if new:
            self.round_id, self.text = round_id, self.text + new
        return new

    def settle(self, round_id: str | None, *, goes_on: bool = False) -> str:
        """Return the words that a round has written, and forget them: something else says what they became.

        Args:
            goes_on: whether the round may write others.
        """
        if round_id is not None and not goes_on:
            self._settled.add(round_id)
        if round_id != self.round_id or round_id is None:
            return ""
        return self.interrupt()

    def interrupt(self) -> str:
        """Return the words that were written so far, and forget them: the rest is none of them."""
        text, self.round_id, self.text = self.text, None, ""
        return text
