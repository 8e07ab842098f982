"""Rows of the query models, on the other in-memory services."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from nekro_agent import layout
from nekro_agent.execution.effects import effect_id
from nekro_agent.ports import ChatInfo, MessageKind
from nekro_agent.records import PluginValue, PresetInfo, StoredMessage, UserInfo
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
        self._users: dict[int, UserInfo] = {}
        self._presets: dict[int, PresetInfo] = {}
        #: Their ids, by the effect that stored them.
        self._preset_ids: dict[str, int] = {}
        self._last_id = 0

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

    async def add_message(
        self,
        chat_key: str,
        *,
        kind: MessageKind,
        text: str,
        message_id: str | None = None,
        sender_id: str | None = None,
        sender_name: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> StoredMessage:
        """Append a message."""
        if self._find(message_id) is None:
            message_id = self._messages.add(
                chat_key,
                kind,
                text,
                sender_id=sender_id,
                sender_name=sender_name,
                message_id=message_id,
                data=data,
            )
        found = self._find(message_id)
        assert found is not None  # noqa: S101 - it was just added
        return found

    async def change_message(self, message_id: str, changes: Mapping[str, Any]) -> bool:
        """Change a message; False if there is none."""
        row = self._find(message_id)
        if row is None:
            return False
        history = self._messages.history
        history[history.index(row)] = dataclasses.replace(row, **changes)
        return True

    async def delete_message(self, message_id: str) -> bool:
        """Delete a message; False if there is none."""
        row = self._find(message_id)
        if row is None:
            return False
        self._messages.history.remove(row)
        return True

    def _find(self, message_id: str | None) -> StoredMessage | None:
        return next((row for row in self._messages.history if row.id == message_id), None)

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats."""
        found = {m.chat_key: _chat(m.chat_key) for m in self._messages.history} | self.known_chats
        return [chat for key, chat in found.items() if chat_key in (None, key)][:limit]

    async def change_chat(self, chat_key: str, changes: Mapping[str, Any]) -> ChatInfo:
        """Change a chat, which is created if there is none."""
        known = self.known_chats.get(chat_key) or _chat(chat_key)
        self.known_chats[chat_key] = dataclasses.replace(known, **changes)
        return self.known_chats[chat_key]

    async def reset_chat(self, chat_key: str) -> None:
        """Record the time of the reset."""
        await self.change_chat(chat_key, {"reset_at": datetime.now(UTC)})

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

    async def users(self, *, platform_userid: str | None, limit: int) -> list[UserInfo]:
        """Return users, oldest first."""
        everyone = self._users.values()
        return [user for user in everyone if platform_userid in (None, user.platform_userid)][:limit]

    async def change_user(
        self, adapter_key: str, platform_userid: str, changes: Mapping[str, Any]
    ) -> UserInfo:
        """Change a user, who is added if there is none."""
        address = (adapter_key, platform_userid)
        known = [u for u in self._users.values() if (u.adapter_key, u.platform_userid) == address]
        new = UserInfo(
            id=self._next_id(),
            adapter_key=adapter_key,
            platform_userid=platform_userid,
            username="",
            created_at=datetime.now(UTC),
        )
        user = dataclasses.replace(known[0] if known else new, **changes, updated_at=datetime.now(UTC))
        self._users[user.id] = user
        return user

    async def delete_user(self, user_id: int) -> bool:
        """Delete a user; False if there is none."""
        return self._users.pop(user_id, None) is not None

    async def presets(self, *, preset_id: int | None, limit: int) -> list[PresetInfo]:
        """Return presets, oldest first."""
        return [preset for key, preset in self._presets.items() if preset_id in (None, key)][:limit]

    async def add_preset(self, values: Mapping[str, Any]) -> PresetInfo:
        """Store a persona; a call that is repeated stores none twice."""
        once_key = effect_id("preset")
        known = self._presets.get(self._preset_ids.get(once_key, 0))
        if known is not None:
            return known
        now = datetime.now(UTC)
        preset = PresetInfo(id=self._next_id(), **values, created_at=now, updated_at=now)
        self._presets[preset.id] = preset
        self._preset_ids[once_key] = preset.id
        return preset

    async def change_preset(self, preset_id: int, changes: Mapping[str, Any]) -> bool:
        """Change a persona; False if there is none."""
        known = self._presets.get(preset_id)
        if known is None:
            return False
        self._presets[preset_id] = dataclasses.replace(known, **changes, updated_at=datetime.now(UTC))
        return True

    async def delete_preset(self, preset_id: int) -> bool:
        """Delete a persona; False if there is none."""
        return self._presets.pop(preset_id, None) is not None

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _chat(chat_key: str) -> ChatInfo:
    return ChatInfo(chat_key=chat_key, container_key=layout.default_container_key(chat_key))
