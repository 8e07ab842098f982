"""Queries of plugins over chats, messages and stored values: the SDK's ``Records`` on rows."""

from __future__ import annotations

from datetime import datetime

from nekro_agent.ports import ChatInfo, PluginValue, StoredMessage
from storage.engine import Database

__all__ = ["SqlRecords"]


class SqlRecords:
    """Implements ``nekro_agent.ports.Records``; reads only."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; of all chats when ``chat_key`` is None."""
        async with self._database.read() as transaction:
            return await transaction.records.messages(chat_key=chat_key, since=since, limit=limit)

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; only that one when ``chat_key`` is given."""
        async with self._database.read() as transaction:
            return await transaction.records.chats(chat_key=chat_key, limit=limit)

    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values; a filter that is None matches everything."""
        async with self._database.read() as transaction:
            return await transaction.records.plugin_values(
                plugin_key=plugin_key, store_key=store_key, chat_key=chat_key, limit=limit
            )
