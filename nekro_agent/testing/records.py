"""Data for the query models, read from the other in-memory services."""

from __future__ import annotations

from datetime import datetime

from nekro_agent import layout
from nekro_agent.ports import ChatInfo, PluginValue, StoredMessage
from nekro_agent.testing.messages import InMemoryMessages
from nekro_agent.testing.store import InMemoryStore

__all__ = ["InMemoryRecords"]


class InMemoryRecords:
    """Implements ``Records``."""

    def __init__(self, messages: InMemoryMessages, store: InMemoryStore) -> None:
        self._messages = messages
        self._store = store
        #: Known chats in addition to those that have messages.
        self.known_chats: dict[str, ChatInfo] = {}

    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first."""
        rows = [
            m
            for m in reversed(self._messages.history)
            if chat_key in (None, m.chat_key) and (since is None or m.created_at >= since)
        ]
        return rows[:limit]

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats."""
        found = {
            m.chat_key: ChatInfo(chat_key=m.chat_key, container_key=layout.default_container_key(m.chat_key))
            for m in self._messages.history
        } | self.known_chats
        return [chat for key, chat in found.items() if chat_key in (None, key)][:limit]

    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values."""
        return [
            value
            for value in self._store.entries()
            if plugin_key in (None, value.plugin_key)
            and store_key in (None, value.store_key)
            and chat_key in (None, value.chat_key)
        ][:limit]
