"""A response and its stream, built from the messages of a turn.

The events of a stream follow from the kept events of the turn, so each reading numbers them in the same way:
a client that has seen a number continues after it, on any gateway.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from gateway.openai.answers import AnswerEnd, AnswerReader, Piece, Usage
from nekro_agent.errors import BudgetExceededError
from storage.access.openai_responses import OpenAIResponse

__all__ = ["ResponseView", "item_of"]

_STATUS = {"done": "completed", "failed": "failed", "cancelled": "cancelled"}
#: The last event of a stream. The protocol has none of its own for a cancelled response.
_LAST = {"completed": "response.completed", "failed": "response.failed", "cancelled": "response.incomplete"}


@dataclass
class ResponseView:
    """What clients see of a response; it grows while its turn is read."""

    row: OpenAIResponse
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
            if number > after:
                yield {**event, "sequence_number": number}

    async def _all_events(self, reader: AnswerReader) -> AsyncIterator[dict[str, Any]]:
        yield {"type": "response.created", "response": self.as_json()}
        yield {"type": "response.in_progress", "response": self.as_json()}
        async for part in self._parts(reader):
            index = len(self.output)
            item = self._add(part)
            if item is not None:
                for event in _item_events(item, index):
                    yield event
        if self.end is not None:
            yield {"type": _LAST[self.status], "response": self.as_json()}

    async def _parts(self, reader: AnswerReader) -> AsyncIterator[Piece | AnswerEnd]:
        if self.row.turn_id is None:  # the message was blocked, or not addressed to the agent
            yield AnswerEnd(state="done", error=None, usage=Usage(), at=self.row.created_at)
            return
        async for part in reader.read(self.row.turn_id):
            yield part

    def _add(self, part: Piece | AnswerEnd) -> dict[str, Any] | None:
        """Add a part; returns the output item of a message, None for the end."""
        if isinstance(part, AnswerEnd):
            self.end = part
            self.status = "failed" if part.error is not None else _STATUS.get(part.state, "completed")
            return None
        item = item_of(part)
        self.output.append(item)
        return item

    def _completed_at(self) -> int | None:
        is_complete = self.end is not None and self.status == "completed" and self.end.at is not None
        return int(self.end.at.timestamp()) if is_complete and self.end and self.end.at else None


def _error(code: str, text: str) -> dict[str, str]:
    """Return an error with one of the codes that the protocol has."""
    known = "rate_limit_exceeded" if code == BudgetExceededError.code else "server_error"
    return {"code": known, "message": f"{code}: {text}"}


def item_of(piece: Piece) -> dict[str, Any]:
    """Return the output item of a message."""
    content = {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{piece.message_id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [content],
    }


def _item_events(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    (content,) = item["content"]
    where = {"item_id": item["id"], "output_index": index, "content_index": 0}
    empty = {**content, "text": ""}
    text = content["text"]
    return [
        {
            "type": "response.output_item.added",
            "output_index": index,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **where, "part": empty},
        {"type": "response.output_text.delta", **where, "delta": text, "logprobs": []},
        {"type": "response.output_text.done", **where, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **where, "part": content},
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _conversation(row: OpenAIResponse) -> dict[str, str] | None:
    conversation = row.stated.get("conversation")
    return {"id": conversation} if conversation else None


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
