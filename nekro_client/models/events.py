"""Events of chats, hints about changes, and tickets for their streams."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from nekro_client.models.base import Answer, Body, ChatKey

__all__ = [
    "Change",
    "ChangeKind",
    "Event",
    "StreamTicket",
    "StreamTicketBody",
]


class ChangeKind(StrEnum):
    """What has changed: a list to read again. Those of the first group are sent per chat."""

    #: The chat's messages, so its entry in the list of chats too.
    CHATS = "chats"
    #: Its turns and rounds.
    TURNS = "turns"
    #: Also without a chat, which means jobs of any chat or of none.
    JOBS = "jobs"
    APPROVALS = "approvals"
    TIMERS = "timers"

    WORKERS = "workers"
    QUEUES = "queues"
    DEAD_LETTERS = "dead_letters"
    PLUGINS = "plugins"
    MCP_SERVERS = "mcp_servers"
    KEYS = "keys"
    COSTS = "costs"
    #: Administrative acts.
    AUDIT = "audit"

    #: Changes may have been missed: read everything again. Each stream begins with it unless it resumes.
    RESET = "reset"


class Change(Answer):
    """A hint that something has changed; several changes may be one hint."""

    kind: str
    #: None: of no chat, or of any.
    chat_key: str | None = None


class Event(Answer):
    """Something that happened in a chat."""

    #: Grows by 1 within a chat; None for live events.
    number: int | None = None
    type: str
    chat_key: str
    at: datetime
    turn_id: str | None = None
    round_id: str | None = None
    call_id: str | None = None
    message_id: str | None = None
    #: Depends on the type; see docs/api.md.
    data: dict[str, Any] = {}


class StreamTicketBody(Body):
    """Which stream a ticket is for."""

    #: The chat whose events it reads; None: it reads the stream of changes.
    chat_key: ChatKey | None = None


class StreamTicket(Answer):
    """The right to read an event stream without a key."""

    ticket: str
    #: Path and parameters of the stream, with the ticket; for a chat add ``&after=`` to begin after a number.
    path: str
    #: When browsers can no longer connect with it.
    expires_at: datetime
