"""Output items of a response, and the events of a stream that show one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from nekro.extensions.openai.answers import Program

__all__ = ["GrowingItem", "message_item", "reasoning_item"]

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


def reasoning_item(program: Program) -> dict[str, Any]:
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
