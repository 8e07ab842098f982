"""Whom and what a key of the HTTP API is for, and its limits: one form for its row, and for requests with it.

It is a module of its own, because processes that read no rows need it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime
from typing import Final

__all__ = ["LIMITS", "OFF_AT_ZERO", "KeyRights"]


@dataclass(frozen=True, kw_only=True)
class KeyRights:
    """What a key may do, besides its scopes."""

    #: Pattern of the chat keys, in the form of ``fnmatch``.
    chats: str = "*"
    #: The only user for whom it acts; None: each request names one.
    user_id: str | None = None
    #: None: as the settings say; 0: no limit.
    requests_per_minute: int | None = None
    #: Limits per day (UTC) of the turns that it starts; None: no limit.
    cost_per_day: float | None = None
    tokens_per_day: int | None = None
    #: Most bytes that it may keep stored; None: as the settings say; 0: no limit.
    stored_bytes_limit: int | None = None
    #: None: never.
    expires_at: datetime | None = None

    @classmethod
    def of(cls, source: object) -> KeyRights:
        """Return the rights that an object has as attributes: a row, or a body that creates one."""
        return cls(**{name: getattr(source, name) for name in _NAMES})


_NAMES: Final = tuple(one.name for one in fields(KeyRights))
#: A key gives no other key more than it has of these.
LIMITS: Final = tuple(name for name in _NAMES if name not in ("chats", "user_id"))
#: Those of them that 0 switches off.
OFF_AT_ZERO: Final = frozenset({"requests_per_minute", "stored_bytes_limit"})
