"""Outgoing webhooks, and requests of clients of adapters."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field, JsonValue

from nekro_client.models.base import Answer, Body
from nekro_client.models.events import Event

__all__ = [
    "AdapterAnswer",
    "AdapterRequestBody",
    "NewWebhook",
    "ReplayBody",
    "Replayed",
    "Webhook",
    "WebhookBody",
    "WebhookChange",
    "WebhookDelivery",
    "WebhookPayload",
]


class WebhookBody(Body):
    """A subscription of a URL to events."""

    url: str = Field(max_length=2000)
    #: Patterns of event types: ``message.sent``, ``turn.*``.
    events: list[str] = Field(["*"], min_length=1, max_length=50)
    #: Pattern of the chat keys.
    chats: str = Field("*", max_length=200)
    description: str = Field("", max_length=500)


class WebhookChange(Body):
    """What changes of a subscription; None keeps a value."""

    url: str | None = Field(None, max_length=2000)
    events: list[str] | None = Field(None, min_length=1, max_length=50)
    chats: str | None = Field(None, max_length=200)
    description: str | None = Field(None, max_length=500)
    is_active: bool | None = None


class Webhook(Answer):
    """A subscription of a URL to events."""

    id: str
    url: str
    description: str
    events: list[str]
    chats: str
    is_active: bool
    #: Why it was deactivated; None if an operator did, or if it is active.
    fault: str | None = None
    created_at: datetime


class NewWebhook(Webhook):
    """A subscription with its secret, which is not shown again."""

    #: ``whsec_…``, for libraries of Standard Webhooks.
    secret: str


class WebhookPayload(Answer):
    """Body of a delivery."""

    type: str
    timestamp: datetime
    data: Event


class WebhookDelivery(Answer):
    """The delivery of one event."""

    #: The header ``webhook-id`` of every attempt.
    id: str
    chat_key: str
    event_number: int
    type: str
    #: ``waiting``, ``done`` or ``dead``.
    state: str
    attempts: int
    #: When the next attempt is due; None if it has ended.
    due_at: datetime | None = None
    #: HTTP status of the last answer; None without one.
    status: int | None = None
    error: str | None = None
    created_at: datetime
    finished_at: datetime | None = None


class ReplayBody(Body):
    """What to deliver again."""

    #: An ended delivery; None means every dead letter.
    delivery_id: str | None = None


class Replayed(Answer):
    """Answer to a replay."""

    #: Number of deliveries that are due again.
    count: int


class AdapterRequestBody(Body):
    """A question to the client that connects a channel."""

    channel_id: str = Field(min_length=1, max_length=200)
    request: Literal["get_user_info", "get_channel_info", "get_self_info", "set_message_reaction"]
    data: dict[str, JsonValue] = {}
    #: How long to wait for the answer.
    timeout_seconds: float = Field(30, gt=0, le=120)


class AdapterAnswer(Answer):
    """What a client answered."""

    data: dict[str, Any]
