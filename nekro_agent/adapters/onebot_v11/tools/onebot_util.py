"""Properties of the events that handlers of ``nonebot`` receive."""

from __future__ import annotations

from nekro_agent.tools.onebot_util import get_chat_info, get_chat_info_old, get_message_reply_info

__all__ = ["get_chat_info", "get_chat_info_old", "get_message_reply_info"]
