"""The rows that plugins read, at the import paths that plugins of Nekro Agent use."""

from __future__ import annotations

from nekro_agent.models.db_chat_channel import DBChatChannel
from nekro_agent.models.db_chat_message import DBChatMessage
from nekro_agent.models.db_plugin_data import DBPluginData
from nekro_agent.models.db_preset import DBPreset
from nekro_agent.models.db_recurring_timer_job import DBRecurringTimerJob
from nekro_agent.models.db_user import DBUser

__all__ = [
    "DBChatChannel",
    "DBChatMessage",
    "DBPluginData",
    "DBPreset",
    "DBRecurringTimerJob",
    "DBUser",
]
