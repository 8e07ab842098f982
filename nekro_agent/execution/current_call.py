"""The call whose code runs: what the code sends or starts is recorded as part of the call's turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

__all__ = ["CurrentCall", "cause_turn_id", "current_call", "serving", "working_for"]


@dataclass(frozen=True, kw_only=True)
class CurrentCall:
    """The ids of a call."""

    call_id: str
    chat_key: str
    #: None outside rounds.
    round_id: str | None
    turn_id: str | None


#: The chat and the turn that started the job whose code runs.
_cause: Final[ContextVar[tuple[str, str] | None]] = ContextVar("nekro_cause_turn", default=None)
_current: Final[ContextVar[CurrentCall | None]] = ContextVar("nekro_current_call", default=None)


@contextmanager
def serving(call: CurrentCall) -> Iterator[None]:
    """Let the code of the block, and the tasks that it starts, belong to a call."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def working_for(chat_key: str, turn_id: str | None) -> Iterator[None]:
    """Let turns that the code of the block begins in a chat be caused by an earlier turn; None: by none."""
    token = _cause.set(None if turn_id is None else (chat_key, turn_id))
    try:
        yield
    finally:
        _cause.reset(token)


def cause_turn_id(chat_key: str) -> str | None:
    """Return the turn on whose behalf the running code works; None if there is none, or of another chat."""
    call, cause = current_call(chat_key), _cause.get()
    if call is not None:
        return call.turn_id
    return cause[1] if cause is not None and cause[0] == chat_key else None


def current_call(chat_key: str) -> CurrentCall | None:
    """Return the call that the running code serves; None outside of calls, and for another chat."""
    call = _current.get()
    return call if call is not None and call.chat_key == chat_key else None
