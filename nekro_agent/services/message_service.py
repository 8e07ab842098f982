"""System messages and triggering the agent, as a service object."""

from __future__ import annotations

from typing import Any

from nekro_agent import runtime
from nekro_agent.api.message import push_system

__all__ = ["MessageService", "message_service"]


class MessageService:
    """``message_service`` of the reference."""

    async def push_system_message(
        self,
        chat_key: str,
        agent_messages: str | Any,
        trigger_agent: bool = False,
        db_chat_channel: object = None,
    ) -> None:
        """Add a system message to a chat's history; optionally trigger the agent.

        Args:
            agent_messages: a text, or a list of segments with ``content`` or ``text``.
            db_chat_channel: accepted for compatibility, not used.
        """
        await push_system(chat_key, _text_of(agent_messages), trigger_agent=trigger_agent)

    async def schedule_agent_task(self, chat_key: str, **unused: object) -> None:
        """Request a round of the chat's agent."""
        await runtime.current().messages.wake(chat_key)


message_service = MessageService()


def _text_of(messages: object) -> str:
    if isinstance(messages, list | tuple):
        return "".join(_text_of(part) for part in messages)
    for name in ("content", "text"):
        text = getattr(messages, name, None)
        if isinstance(text, str):
            return text
    return str(messages)
