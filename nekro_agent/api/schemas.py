"""Types of the values that plugins receive and send."""

from __future__ import annotations

from typing import TypeAlias

from nekro_agent.schemas.agent_ctx import AgentCtx, WebhookRequest
from nekro_agent.schemas.agent_message import AgentMessageSegment, AgentMessageSegmentType
from nekro_agent.schemas.chat_message import ChatMessage, ChatType

__all__ = [
    "AgentCtx",
    "AgentMessageSegment",
    "AgentMessageSegmentType",
    "ChatMessage",
    "ChatType",
    "MessageContent",
    "WebhookRequest",
]

#: What ``message_service`` takes as a message.
MessageContent: TypeAlias = str | list[AgentMessageSegment]
