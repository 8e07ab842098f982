"""Types of the values that plugins receive."""

from __future__ import annotations

from nekro_agent.schemas.agent_ctx import AgentCtx, WebhookRequest
from nekro_agent.schemas.chat_message import ChatMessage, ChatType

__all__ = ["AgentCtx", "ChatMessage", "ChatType", "WebhookRequest"]
