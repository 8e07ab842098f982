"""One attempt at a request: what was received of its answer, its fault, and whether and when it is repeated.

This module needs no HTTP library, as readers of what an answer has so far need it too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from nekro_agent.errors import (
    LLMAccessError,
    LLMContextError,
    LLMError,
    LLMFilterError,
    LLMUnavailableError,
    LLMUnreadableError,
)

__all__ = [
    "BACKOFF_SECONDS",
    "NOT_CONNECTED",
    "Fault",
    "Gathered",
    "RetryPolicy",
    "TryFailed",
    "dict_of",
    "joined",
    "list_of",
    "name_in",
    "unreadable",
]


#: Pause before the second attempt: endpoints recover from an overload in seconds.
BACKOFF_SECONDS: Final = 1.0

#: Begins the description of a fault of the connection.
NOT_CONNECTED: Final = "connection failed"
#: Statuses below 500 that are temporary: request timeout, conflict, too early, too many requests.
_TRANSIENT: Final = frozenset({408, 409, 425, 429})
#: Faults that the same request meets again, whatever the status.
_PERMANENT: Final = (LLMAccessError, LLMContextError, LLMFilterError)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why one attempt gave no answer.

    ``status`` is None when no response came (connection refused or cut, time limit) or the
    response was not an answer; such faults may be temporary. ``error`` is what the request fails with
    if no attempt succeeds.
    """

    what: str
    error: type[LLMError] = LLMUnavailableError
    status: int | None = None
    retry_after_seconds: float | None = None

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        if issubclass(self.error, _PERMANENT):
            return False
        return self.status is None or self.status >= 500 or self.status in _TRANSIENT

    @property
    def is_refusal(self) -> bool:
        """Whether the endpoint did no work for the request: it was refused, or did not arrive."""
        if self.status is not None and self.status != 200:
            return True
        return self.what.startswith(NOT_CONNECTED) and self.error is LLMUnavailableError


class TryFailed(Exception):
    """Ends one attempt; caught by the retry loop of a client and never leaves it."""

    def __init__(self, fault: Fault) -> None:
        """Keep why there is no answer."""
        super().__init__(fault.what)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential backoff with jitter, or the pause that the endpoint requests.

    Args:
        longest_seconds: if an endpoint requests a longer pause, the request fails.
    """

    tries: int
    backoff_seconds: float
    longest_seconds: float

    def pause_seconds(self, fault: Fault, failed: int) -> float | None:
        """Return the pause before the next attempt, or None if there is none.

        Args:
            failed: attempts that failed so far, >= 1.

        Source: "equal jitter": half of the exponential step is fixed, half is random, so that
        clients that failed together do not retry together.
        """
        if failed >= self.tries or not fault.is_transient:
            return None
        if fault.retry_after_seconds is not None:
            # Never earlier than requested; the jitter is added.
            pause = fault.retry_after_seconds + random.uniform(0, self.backoff_seconds)  # noqa: S311
            return pause if fault.retry_after_seconds <= self.longest_seconds else None
        step = min(self.backoff_seconds * 2.0 ** (failed - 1), self.longest_seconds)
        return step / 2 + random.uniform(0, step / 2)  # noqa: S311 - jitter, not a secret


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
