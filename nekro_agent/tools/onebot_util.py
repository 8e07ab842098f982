"""Properties of the events that handlers of ``nonebot`` receive."""

from __future__ import annotations

from typing import Any

from nekro_agent.errors import InvalidValueError
from nekro_agent.schemas.chat_message import ChatType

__all__ = ["get_chat_info", "get_chat_info_old", "get_message_reply_info"]


async def get_chat_info(event: Any) -> tuple[str, ChatType]:
    """Return the channel id of an event's chat, such as ``group_123``, and its kind.

    Raises:
        InvalidValueError: the event is of no group and of no person.
    """
    kind = getattr(event, "message_type", "group")
    if kind == "group" and getattr(event, "group_id", None):
        return f"group_{event.group_id}", ChatType.GROUP
    if kind in ("private", "friend"):
        return f"private_{event.user_id}", ChatType.PRIVATE
    raise InvalidValueError(f"get_chat_info: the event is of no chat (message_type {kind!r})")


async def get_chat_info_old(event: Any) -> tuple[str, ChatType]:
    """Return the chat key of an event, and the kind of the chat.

    Raises:
        InvalidValueError: the event is of no group and of no person.
    """
    chat_key = event.__dict__.get("chat_key")
    if isinstance(chat_key, str):  # a command's event here: its chat may be of any adapter
        return chat_key, ChatType.from_chat_key(chat_key)
    channel_id, kind = await get_chat_info(event)
    return f"onebot_v11-{channel_id}", kind


async def get_message_reply_info(event: Any) -> str:
    """Return the id of the message that an event's message answers; "" if it answers none."""
    for segment in event.original_message:
        if segment.type == "reply":
            return str(segment.data.get("id") or "")
    return ""
