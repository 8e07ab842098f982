"""The call whose code runs: what the code sends or starts is recorded as part of the call's turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

__all__ = ["CurrentCall", "current_call", "serving"]


@dataclass(frozen=True, kw_only=True)
class CurrentCall:
    """The ids of a call."""

    call_id: str
    chat_key: str
    #: None outside rounds.
    round_id: str | None
    turn_id: str | None


_current: Final[ContextVar[CurrentCall | None]] = ContextVar("nekro_current_call", default=None)


@contextmanager
def serving(call: CurrentCall) -> Iterator[None]:
    """Let the code of the block, and the tasks that it starts, belong to a call."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def current_call(chat_key: str) -> CurrentCall | None:
    """Return the call that the running code serves; None outside of calls, and for another chat."""
    call = _current.get()
    return call if call is not None and call.chat_key == chat_key else None
