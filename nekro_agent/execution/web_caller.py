"""Whose request a route of a plugin serves, as a gateway has found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass
from json import dumps, loads
from typing import Final, Self

__all__ = ["WebCaller", "calling", "current_caller"]


@dataclass(frozen=True, kw_only=True)
class WebCaller:
    """The holder of a gateway's key."""

    name: str
    #: The person in whose name the key acts; None: the key has none.
    user_id: str | None
    #: A ``nekro_agent.services.user.role.Role``.
    level: int
    #: On whose account the route works; None: on none.
    account_id: str | None = None

    def to_text(self) -> str:
        """Return it as a header's value."""
        return dumps(astuple(self))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return what ``to_text`` has written."""
        # A gateway of an older release names no account.
        name, user_id, level, account_id = (*loads(text), None)[:4]
        return cls(name=name, user_id=user_id, level=level, account_id=account_id)


_current: Final[ContextVar[WebCaller | None]] = ContextVar("nekro_web_caller", default=None)


@contextmanager
def calling(caller: WebCaller | None) -> Iterator[None]:
    """Let the block serve a request of a caller; None: the caller is unknown."""
    token = _current.set(caller)
    try:
        yield
    finally:
        _current.reset(token)


def current_caller() -> WebCaller | None:
    """Return whose request is served; None without a valid key."""
    return _current.get()
