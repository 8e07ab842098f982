"""The received part of one answer, whatever its protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from nekro.agent.llm.retry import Fault, TryFailed
from nekro_agent.errors import LLMUnreadableError

__all__ = ["Gathered", "dict_of", "joined", "list_of", "name_in", "unreadable"]

#: Most characters of an answer: far above what models write.
_MOST_CHARS: Final = 4 << 20
_MOST_NAME_CHARS: Final = 200
#: Most tools that an answer is said to call.
_MOST_TOOLS: Final = 100


@dataclass
class Gathered:
    """The received part of one answer."""

    model: str
    #: Receives each piece of text, and the message of an error to make it fit for a log.
    on_piece: Callable[[str], None] = field(default=lambda _piece: None, repr=False)
    words: Callable[[str], str] = field(default=lambda text: text, repr=False)
    pieces: list[str] = field(default_factory=list)
    #: The model's refusal to answer, and names of tools that it calls.
    refusal: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    finish_reason: str = ""
    response_id: str = ""
    prompt_tokens: int | None = None
    #: Those of the prompt that the endpoint had in its cache.
    cached_tokens: int = 0
    answer_tokens: int | None = None
    chars: int = 0
    #: Whether nothing more is expected.
    is_over: bool = False

    def add(self, piece: str, *, to: list[str] | None = None) -> None:
        """Append a piece of text to the answer or to another list."""
        self.chars += len(piece)
        if self.chars > _MOST_CHARS:
            raise unreadable(f"the answer has more than {_MOST_CHARS} characters")
        if piece:
            (self.pieces if to is None else to).append(piece)
            self.on_piece(piece)

    def add_tool(self, name: object) -> None:
        """Note the name of a tool that the answer calls."""
        if isinstance(name, str) and len(self.tools) < _MOST_TOOLS:
            self.tools.append(name[:_MOST_NAME_CHARS])

    def note_names(self, source: dict[str, Any], *, model: str = "model", response_id: str = "id") -> None:
        """Note the model and the id that a response names in these fields."""
        self.model = name_in(source, model) or self.model
        self.response_id = name_in(source, response_id) or self.response_id


def joined(pieces: Iterable[str]) -> str:
    """Join pieces; some servers cut between the two halves of a character that JSON writes as a pair."""
    text = "".join(pieces).encode("utf-16-le", "surrogatepass")
    return text.decode("utf-16-le", "surrogatepass")


def unreadable(what: str) -> TryFailed:
    """Return the fault of a response that is no answer."""
    return TryFailed(Fault(what=what, error=LLMUnreadableError, status=200))


def dict_of(value: object) -> dict[str, Any]:
    """Return an object of JSON; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    """Return a list of JSON; an empty one for anything else."""
    return value if isinstance(value, list) else []


def name_in(source: dict[str, Any], field_name: str) -> str:
    """Return a short text of an endpoint; "" if it is none."""
    value = source.get(field_name)
    return value[:_MOST_NAME_CHARS] if isinstance(value, str) else ""
