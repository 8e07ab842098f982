"""The message that ``on_user_message`` hooks receive."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ChatMessage", "ChatType"]


class ChatType(StrEnum):
    """Kind of chat."""

    PRIVATE = "private"
    GROUP = "group"
    UNKNOWN = "unknown"

    @classmethod
    def from_chat_key(cls, chat_key: str) -> ChatType:
        """Derive it from a key such as ``onebot_v11-group_123``."""
        lowered = chat_key.lower()
        for kind in (cls.GROUP, cls.PRIVATE):
            if kind.value in lowered:
                return kind
        return cls.UNKNOWN


class ChatMessage(BaseModel):
    """One incoming message."""

    model_config = ConfigDict(extra="allow")

    chat_key: str
    message_id: str = ""
    sender_id: str = ""
    sender_name: str = ""
    sender_nickname: str = ""
    platform_userid: str = ""
    adapter_key: str = ""
    chat_type: ChatType = ChatType.UNKNOWN
    is_tome: int = 0
    is_recalled: bool = False
    content_text: str = ""
    content_data: list[Any] = Field(default_factory=list)
    raw_cq_code: str = ""
    ext_data: dict[str, Any] = Field(default_factory=dict)
    #: Seconds since the epoch.
    send_timestamp: int = 0

    @property
    def is_self(self) -> bool:
        """Whether the agent itself wrote it."""
        return self.sender_id == "-1"
