"""Read-only queries across chats and plugins, as plugins of Nekro Agent make them through its models."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select

from nekro_agent.ports import ChatInfo, PluginValue, StoredMessage
from storage.models import ChatRow, MessageRow, PluginValueRow
from storage.repositories.base import Repository

__all__ = ["RecordRepository"]


class RecordRepository(Repository):
    """The read-only queries of ``nekro_agent.ports.Records``."""

    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; a filter of None matches all."""
        statement = select(MessageRow, ChatRow.adapter_key).join(
            ChatRow, ChatRow.chat_key == MessageRow.chat_key
        )
        if chat_key is not None:
            statement = statement.where(MessageRow.chat_key == chat_key)
        if since is not None:
            statement = statement.where(MessageRow.created_at >= since)
        return await self._all(StoredMessage, statement.order_by(MessageRow.sequence.desc()).limit(limit))

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; a filter of None matches all."""
        statement = select(ChatRow)
        if chat_key is not None:
            statement = statement.where(ChatRow.chat_key == chat_key)
        newest = statement.order_by(ChatRow.created_at.desc(), ChatRow.chat_key).limit(limit)
        return await self._all(ChatInfo, newest)

    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values, oldest first; a filter of None matches all."""
        statement = select(PluginValueRow)
        if plugin_key is not None:
            statement = statement.where(PluginValueRow.plugin_key == plugin_key)
        if store_key is not None:
            statement = statement.where(PluginValueRow.store_key == store_key)
        if chat_key is not None:
            statement = statement.where(PluginValueRow.chat_key == chat_key)
        oldest = statement.order_by(PluginValueRow.created_at, PluginValueRow.digest).limit(limit)
        return await self._all(PluginValue, oldest)
