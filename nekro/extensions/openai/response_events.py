"""A response and its stream, built from the messages of a turn: output items and their events.

The events of a stream follow from the kept events of the turn, so each reading numbers them in the same
way: a client that has seen a number continues after it, on any gateway. Live words are cut into the
same pieces as their whole message. Words without a message, such as text before a program, are an item of
the phase ``commentary``; programs are items of reasoning. If a worker dies while its model writes, the words
until then are such an item for those alone who saw them; the last event, always sent, has the whole
output.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from nekro.extensions.openai.answers import (
    AnswerEnd,
    AnswerReader,
    Part,
    Piece,
    ProgramStep,
    TurnUsage,
    Words,
)
from nekro.extensions.openai.rows import StoredResponse
from nekro_agent.errors import BudgetExceededError

__all__ = [
    "GrowingItem",
    "ResponseView",
    "message_item",
    "reasoning_item",
]


#: Characters of one event with text: few at the beginning, which people read while it is written, later more.
_FEW_CHARS: Final = 8

_MANY_CHARS: Final = 64
#: Where a text is cut into larger pieces.
_LONG_CHARS: Final = 2_000


def message_item(
    item_id: str, text: str, *, status: str | None = None, phase: str | None = None
) -> dict[str, Any]:
    """Return a message; ``phase`` is ``commentary`` for what is none of the answer."""
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status or "completed",
        "phase": phase,
        "content": [content],
    }


def reasoning_item(program: ProgramStep) -> dict[str, Any]:
    """Return a program as reasoning."""
    return {
        "id": f"rs_{program.round_id}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": program.code}],
    }


class GrowingItem:
    """The events of one item; the text is cut in the same way whether it comes in pieces or at once."""

    def __init__(self, item: dict[str, Any], index: int) -> None:
        """Begin with an item without a text at a place in the output."""
        self._item = {**item, "content": []}
        self._kind = "output_text" if item["type"] == "message" else "reasoning_text"
        self._where = {"item_id": item["id"], "output_index": index, "content_index": 0}
        self._empty = {**item["content"][0], "text": ""}
        self._is_open = False
        #: Text that was not sent, and how much was.
        self._text, self._sent = "", 0

    def grow(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the events for more text."""
        yield from self._opened()
        self._text += text
        yield from self._deltas(is_whole=False)

    def finish(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events up to the end; the text of the item begins with what came."""
        yield from self._opened()
        (content,) = item["content"]
        self._text += content["text"][self._sent + len(self._text) :]
        yield from self._deltas(is_whole=True)
        done = {"text": content["text"], **self._fields()}
        yield {"type": f"response.{self._kind}.done", **self._where, **done}
        yield {"type": "response.content_part.done", **self._where, "part": content}
        index = self._where["output_index"]
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _opened(self) -> Iterator[dict[str, Any]]:
        if self._is_open:
            return
        self._is_open = True
        index = self._where["output_index"]
        item = {**self._item, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        yield {"type": "response.content_part.added", **self._where, "part": self._empty}

    def _deltas(self, *, is_whole: bool) -> Iterator[dict[str, Any]]:
        """Yield the pieces that are complete; of a whole text also the last one, which may be short."""
        begin = 0
        while begin < len(self._text) or (is_whole and not self._sent and not begin):
            size = _FEW_CHARS if self._sent < _LONG_CHARS else _MANY_CHARS
            if self._kind == "reasoning_text":  # it comes at once
                size = max(1, len(self._text))
            piece = self._text[begin : begin + size]
            if len(piece) < size and not is_whole:
                break
            yield {"type": f"response.{self._kind}.delta", **self._where, "delta": piece, **self._fields()}
            begin += size
            self._sent += len(piece)
        self._text = self._text[begin:]

    def _fields(self) -> dict[str, Any]:
        """Return what events of words have besides their text."""
        return {"logprobs": []} if self._kind == "output_text" else {}


_STATUS = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}
#: The last event of a stream. The protocol has none of its own for a cancelled response.
_LAST = {"completed": "response.completed", "failed": "response.failed", "cancelled": "response.incomplete"}


@dataclass
class ResponseView:
    """What clients see of a response; it grows while its turn is read."""

    row: StoredResponse
    output: list[dict[str, Any]] = field(default_factory=list)
    status: str = "in_progress"
    end: AnswerEnd | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the response as it is now."""
        row = self.row
        error = self.end.error if self.end is not None else None
        return {
            "id": row.id,
            "object": "response",
            "created_at": int(row.created_at.timestamp()),
            "status": self.status,
            "background": row.is_background,
            "completed_at": self._completed_at(),
            "error": None if error is None else _error(*error),
            "incomplete_details": None,
            "instructions": None,
            "metadata": row.stated.get("metadata") or {},
            "model": row.model,
            "output": list(self.output),
            "parallel_tool_calls": False,
            "previous_response_id": row.previous_id,
            "conversation": _conversation(row),
            "store": row.stated.get("store", True),
            "temperature": None,
            "tool_choice": "none",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None if self.end is None else _usage(self.end.usage),
            "user": row.stated.get("user"),
        }

    async def finish(self, reader: AnswerReader) -> None:
        """Read the turn to its end; the status stays ``in_progress`` if this gateway stops before."""
        async for part in self._parts(reader):
            self._add(part)

    async def events(self, reader: AnswerReader, *, after: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the stream with a number above ``after``; -1 means all."""
        number = -1
        async for event in self._all_events(reader):
            number += 1
            if number > after or event["type"] in _LAST.values():
                yield {**event, "sequence_number": max(number, after + 1)}

    async def _all_events(self, reader: AnswerReader) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self.as_json()}
        yield {"type": "response.in_progress", "response": self.as_json()}
        growing: GrowingItem | None = None
        async for part in self._parts(reader, with_live=True):
            if isinstance(part, Words | Piece):
                growing = growing or GrowingItem(self._message("", status="in_progress"), len(self.output))
                for event in growing.grow(part.text) if isinstance(part, Words) else ():
                    yield event
            item = self._add(part)
            if item is not None:
                growing = growing or GrowingItem({**item, "status": "in_progress"}, len(self.output) - 1)
                for event in growing.finish(item):
                    yield event
                growing = None
        if self.end is not None:
            yield {"type": _LAST[self.status], "response": self.as_json()}

    async def _parts(self, reader: AnswerReader, *, with_live: bool = False) -> AsyncIterator[Part]:
        if self.row.turn_id is None:  # the message was blocked, or not addressed to the agent
            yield AnswerEnd(state="done", error=None, usage=TurnUsage(), at=self.row.created_at)
            return
        async for part in reader.read(self.row.turn_id, with_live=with_live):
            yield part

    def _add(self, part: Part) -> dict[str, Any] | None:
        """Add a part; returns the output item that it completes, None if it completes none."""
        item: dict[str, Any] | None = None
        if isinstance(part, AnswerEnd):
            self.end = part
            self.status = "failed" if part.error is not None else _STATUS.get(part.state, "completed")
        elif isinstance(part, Piece):
            item = self._message(part.text, phase="commentary" if part.is_preface else None)
        elif isinstance(part, ProgramStep) and part.code:
            item = reasoning_item(part)
        if item is not None:
            self.output.append(item)
        return item

    def add_pieces(self, pieces: Iterable[Piece]) -> None:
        """Add messages of a turn that has not ended."""
        for piece in pieces:
            self._add(piece)

    def _message(self, text: str, **fields: str | None) -> dict[str, Any]:
        # The id must be known before the message is.
        return message_item(f"msg_{self.row.turn_id}_{len(self.output)}", text, **fields)

    def _completed_at(self) -> int | None:
        is_complete = self.end is not None and self.status == "completed" and self.end.at is not None
        return int(self.end.at.timestamp()) if is_complete and self.end and self.end.at else None


def _error(code: str, text: str) -> dict[str, str]:
    """Return an error with one of the codes that the protocol has."""
    known = "rate_limit_exceeded" if code == BudgetExceededError.code else "server_error"
    return {"code": known, "message": f"{code}: {text}"}


def _conversation(row: StoredResponse) -> dict[str, str] | None:
    conversation = row.stated.get("conversation")
    return {"id": conversation} if conversation else None


def _usage(usage: TurnUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **usage.mark,
    }
