"""Keys of the API, sessions of the console, and administrative acts."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import AwareDatetime, Field

from nekro_client.models.base import Answer, Body

__all__ = [
    "Act",
    "ApiKey",
    "ConsoleLogin",
    "ConsoleSession",
    "CreatedKey",
    "KeyBody",
    "KeyScope",
]


class ConsoleLogin(Body):
    """A browser logs in to the console with this key, or with the code of a link of `nekro up`."""

    key: str = Field(min_length=1, max_length=200, repr=False)


class ConsoleSession(Answer):
    """Who uses the console, and what it may do."""

    #: None: the local key.
    key_id: str | None
    name: str | None
    scopes: list[str]
    #: Pattern of the chat keys.
    chats: str
    #: The only user for whom the key acts; None: each request names one.
    user_id: str | None
    #: What the header `X-Nekro-CSRF` of each POST, PUT, PATCH and DELETE has; None without a session.
    csrf_token: str | None
    #: When the browser has to log in again; None without a session.
    expires_at: AwareDatetime | None


#: What a key may do.
KeyScope = Literal["read", "post", "call", "run", "approve", "admin"]


class KeyBody(Body):
    """A key to create."""

    name: str = Field(min_length=1, max_length=200)
    scopes: list[KeyScope] = Field(min_length=1)
    #: Pattern of the chat keys: ``*`` any text, ``?`` one character, ``[ab]`` one of them.
    chats: str = Field("*", min_length=1, max_length=500)
    #: The only user for whom it acts; None: each request names one.
    user_id: str | None = None
    #: None: as the settings of the gateway say; 0: no limit.
    requests_per_minute: int | None = Field(None, ge=0, le=1_000_000)
    #: Limits per day (UTC) of the turns that it starts; None: no limit.
    cost_per_day: float | None = Field(None, ge=0, allow_inf_nan=False)
    tokens_per_day: int | None = Field(None, ge=0, le=10**15)
    #: Most bytes that it may keep stored; None: as the settings say; 0: no limit.
    stored_bytes_limit: int | None = Field(None, ge=0, le=10**15)
    #: RFC 3339 with an offset; None: never.
    expires_at: AwareDatetime | None = None


class ApiKey(Answer):
    """A key, without its secret."""

    id: str
    name: str
    scopes: list[str]
    chats: str
    user_id: str | None = None
    requests_per_minute: int | None = None
    cost_per_day: float | None = None
    tokens_per_day: int | None = None
    stored_bytes_limit: int | None = None
    #: What it keeps stored now.
    stored_bytes: int = 0
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None


class CreatedKey(ApiKey):
    """A new key."""

    #: The key itself; it is not stored and cannot be shown again.
    key: str


class Act(Answer):
    """An administrative act."""

    id: str
    at: datetime
    #: The key; None: the local key, or a command.
    key_id: str | None = None
    action: str
    subject: str
    data: dict[str, Any] | None = None
    request_id: str | None = None
