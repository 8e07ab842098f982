"""The chat model that plugins of the reference query."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Self

from nekro_agent import runtime
from nekro_agent.models.base import MAX_ROWS, QueryModel
from nekro_agent.models.db_preset import DBPreset, DefaultPreset
from nekro_agent.ports import ChatInfo
from nekro_agent.schemas.chat_message import ChatType

__all__ = ["DBChatChannel", "DefaultPreset"]


class DBChatChannel(QueryModel):
    """One chat."""

    chat_key: str
    adapter_key: str = ""
    channel_id: str = ""
    channel_name: str = ""
    channel_type: str = ""
    #: Names the sandbox area of the chat; None while nothing is recorded for the chat.
    container_key: str | None = None
    is_active: bool = True
    conversation_start_time: datetime = datetime.fromtimestamp(0, UTC)

    @property
    def chat_type(self) -> ChatType:
        """Private or group."""
        try:
            return ChatType(self.channel_type)
        except ValueError:
            return ChatType.from_chat_key(self.chat_key)

    @classmethod
    async def get_channel(cls, chat_key: str) -> Self:
        """Return the chat; an unknown chat has only its key."""
        return await cls.get_or_none(chat_key=chat_key) or cls(chat_key=chat_key)

    async def get_preset(self) -> DefaultPreset | DBPreset:
        """Return the persona of the agent in this chat."""
        return DefaultPreset.current()

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        records = runtime.current().service("records")
        return [cls._of(chat) for chat in await records.chats(chat_key=equal.get("chat_key"), limit=MAX_ROWS)]

    @classmethod
    def _of(cls, chat: ChatInfo) -> Self:
        return cls(
            chat_key=chat.chat_key,
            adapter_key=chat.adapter_key or "",
            channel_id=chat.channel_id or "",
            channel_name=chat.channel_name or "",
            channel_type=chat.channel_type or "",
            container_key=chat.container_key,
            conversation_start_time=chat.created_at or datetime.fromtimestamp(0, UTC),
        )
