"""Queries and changes of plugins over chats, messages, people and presets: the SDK's ``Records`` on rows."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import append_message
from nekro_agent.execution.effects import effect_id
from nekro_agent.execution.payer import current_account
from nekro_agent.ports import ChatInfo, MessageKind, require_lengths
from nekro_agent.records import PluginValue, PresetInfo, StoredMessage, UserInfo
from storage.driver.outages import outlasting
from storage.engine import Database
from storage.repositories.messages import Message, NewMessage

__all__ = ["SqlRecords"]


class SqlRecords:
    """Implements ``nekro_agent.records.Records``."""

    def __init__(self, database: Database, publisher: EventPublisher) -> None:
        self._database = database
        self._publisher = publisher

    @outlasting
    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; of all chats when ``chat_key`` is None."""
        async with self._database.read() as transaction:
            return await transaction.records.messages(chat_key=chat_key, since=since, limit=limit)

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
        """Append a message and announce it.

        Raises:
            InvalidValueError: it is too long.
        """
        new = NewMessage(
            chat_key=chat_key,
            kind=kind,
            text=text,
            id=message_id or effect_id("record", chat_key),
            sender_id=sender_id,
            sender_name=sender_name,
            data=dict(data) if data else None,
        )
        require_lengths(text, sender_id=sender_id, sender_name=sender_name, data=data)

        @outlasting
        async def append() -> Message:
            async with self._database.begin() as transaction:
                return await append_message(transaction, self._publisher, new, account_id=current_account())

        row = await append()
        return StoredMessage(
            sequence=row.sequence,
            id=row.id,
            chat_key=row.chat_key,
            kind=row.kind,
            sender_id=row.sender_id,
            sender_name=row.sender_name,
            text=row.text,
            created_at=row.created_at,
            data=row.data,
        )

    @outlasting
    async def change_message(self, message_id: str, changes: Mapping[str, Any]) -> bool:
        """Change a message; False when there is none.

        Raises:
            InvalidValueError: its text is too long.
        """
        require_lengths(str(changes.get("text") or ""))
        async with self._database.begin() as transaction:
            return await transaction.records.change_message(message_id, changes)

    @outlasting
    async def delete_message(self, message_id: str) -> bool:
        """Delete a message; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.delete_message(message_id)

    @outlasting
    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; only that one when ``chat_key`` is given."""
        async with self._database.read() as transaction:
            return await transaction.records.chats(chat_key=chat_key, limit=limit)

    @outlasting
    async def change_chat(self, chat_key: str, changes: Mapping[str, Any]) -> ChatInfo:
        """Change a chat, which is created when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.change_chat(chat_key, changes)

    @outlasting
    async def reset_chat(self, chat_key: str) -> None:
        """Begin a new conversation."""
        async with self._database.begin() as transaction:
            await transaction.chats.reset(chat_key)

    @outlasting
    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values; a filter that is None matches everything."""
        async with self._database.read() as transaction:
            return await transaction.records.plugin_values(
                plugin_key=plugin_key, store_key=store_key, chat_key=chat_key, limit=limit
            )

    @outlasting
    async def users(self, *, platform_userid: str | None, limit: int) -> list[UserInfo]:
        """Return users, oldest first; only those of that platform id when it is given."""
        async with self._database.read() as transaction:
            return await transaction.records.users(platform_userid=platform_userid, limit=limit)

    @outlasting
    async def change_user(
        self, adapter_key: str, platform_userid: str, changes: Mapping[str, Any]
    ) -> UserInfo:
        """Change a user, who is added when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.change_user(adapter_key, platform_userid, changes)

    @outlasting
    async def delete_user(self, user_id: int) -> bool:
        """Delete a user; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.delete_user(user_id)

    @outlasting
    async def presets(self, *, preset_id: int | None, limit: int) -> list[PresetInfo]:
        """Return presets, oldest first; only that one when ``preset_id`` is given."""
        async with self._database.read() as transaction:
            return await transaction.records.presets(preset_id=preset_id, limit=limit)

    async def add_preset(self, values: Mapping[str, Any]) -> PresetInfo:
        """Add a preset; a call that is repeated because its worker died adds none twice."""
        once_key = effect_id("preset")

        @outlasting
        async def add() -> PresetInfo:
            async with self._database.begin() as transaction:
                return await transaction.records.add_preset(values, once_key=once_key)

        return await add()

    @outlasting
    async def change_preset(self, preset_id: int, changes: Mapping[str, Any]) -> bool:
        """Change a preset; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.change_preset(preset_id, changes)

    @outlasting
    async def delete_preset(self, preset_id: int) -> bool:
        """Delete a preset; False when there is none."""
        async with self._database.begin() as transaction:
            return await transaction.records.delete_preset(preset_id)
