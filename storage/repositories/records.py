"""Rows as plugins of Nekro Agent query and change them through its models."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Delete, Executable, Update, bindparam, delete, select, update

from nekro_agent.errors import InvalidValueError
from nekro_agent.ports import ChatInfo
from nekro_agent.records import PRESET_FIELDS, PluginValue, PresetInfo, StoredMessage, UserInfo
from storage.driver.statements import FixedStatement
from storage.repositories.base import Repository, found
from storage.repositories.chats import ChatRepository
from storage.sql import insert, now
from storage.tables import CHAT_SUMMARIES, CHATS, MESSAGES, PLUGIN_VALUES, PRESETS, USERS

__all__ = ["RecordRepository"]

#: Columns that plugins may change.
_CHAT_COLUMNS: Final = frozenset(
    ("adapter_key", "channel_id", "channel_name", "channel_type", "preset_id", "is_active", "observe_mode")
)
_MESSAGE_COLUMNS: Final = frozenset(("text", "sender_name", "data"))
_USER_COLUMNS: Final = frozenset(("username", "perm_level", "ban_until", "prevent_trigger_until", "ext_data"))
_PRESET_COLUMNS: Final = frozenset(PRESET_FIELDS)


class RecordRepository(Repository):
    """The statements of ``nekro_agent.records.Records``."""

    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; a filter of None matches all."""
        statement = select(MESSAGES, CHATS.c.adapter_key, CHATS.c.channel_type).join(
            CHATS, CHATS.c.chat_key == MESSAGES.c.chat_key
        )
        if chat_key is not None:
            statement = statement.where(MESSAGES.c.chat_key == chat_key)
        if since is not None:
            statement = statement.where(MESSAGES.c.created_at >= since)
        return await self._all(StoredMessage, statement.order_by(MESSAGES.c.sequence.desc()).limit(limit))

    async def change_message(self, message_id: str, changes: Mapping[str, Any]) -> bool:
        """Change a message; False when there is none."""
        values = _checked("message", changes, _MESSAGE_COLUMNS)
        statement = update(MESSAGES).where(MESSAGES.c.id == message_id).values(**values)
        return await self._revise(message_id, statement)

    async def delete_message(self, message_id: str) -> bool:
        """Delete a message; False when there is none."""
        return await self._revise(message_id, delete(MESSAGES).where(MESSAGES.c.id == message_id))

    async def _revise(self, message_id: str, statement: Update | Delete) -> bool:
        place = select(MESSAGES.c.chat_key, MESSAGES.c.sequence).where(MESSAGES.c.id == message_id)
        message = (await self._rows(place)).first()
        if message is None:
            return False
        chat_key, sequence = message
        await ChatRepository(self._connection).lock(chat_key)
        if not await self._count(statement):
            return False
        await self._count(
            delete(CHAT_SUMMARIES).where(
                CHAT_SUMMARIES.c.chat_key == chat_key, CHAT_SUMMARIES.c.up_to >= sequence
            )
        )
        revised = {"history_revision": CHATS.c.history_revision + 1}
        await self._count(update(CHATS).where(CHATS.c.chat_key == chat_key).values(**revised))
        return True

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; a filter of None matches all."""
        statement = select(CHATS)
        if chat_key is not None:
            statement = statement.where(CHATS.c.chat_key == chat_key)
        newest = statement.order_by(CHATS.c.created_at.desc(), CHATS.c.chat_key).limit(limit)
        return await self._all(ChatInfo, newest)

    async def change_chat(self, chat_key: str, changes: Mapping[str, Any]) -> ChatInfo:
        """Change a chat, which is created when there is none."""
        values = _checked("chat", changes, _CHAT_COLUMNS)
        chats = ChatRepository(self._connection)
        await chats.lock(chat_key, create=True)
        if values:
            await self._count(update(CHATS).where(CHATS.c.chat_key == chat_key).values(**values))
        return await chats.get(chat_key)

    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values, oldest first; a filter of None matches everything."""
        statement = select(PLUGIN_VALUES)
        if plugin_key is not None:
            statement = statement.where(PLUGIN_VALUES.c.plugin_key == plugin_key)
        if store_key is not None:
            statement = statement.where(PLUGIN_VALUES.c.store_key == store_key)
        if chat_key is not None:
            statement = statement.where(PLUGIN_VALUES.c.chat_key == chat_key)
        oldest = statement.order_by(PLUGIN_VALUES.c.created_at, PLUGIN_VALUES.c.digest).limit(limit)
        return await self._all(PluginValue, oldest)

    async def users(self, *, platform_userid: str | None, limit: int) -> list[UserInfo]:
        """Return users, oldest first; a filter of None matches all."""
        statement = select(USERS)
        if platform_userid is not None:
            statement = statement.where(USERS.c.platform_userid == platform_userid)
        return await self._all(UserInfo, statement.order_by(USERS.c.id).limit(limit))

    async def find_user(self, adapter_key: str, platform_userid: str) -> UserInfo | None:
        """Return the user, or None."""
        values = {"of_adapter": adapter_key, "of_user": platform_userid}
        return await self._one_or_none(UserInfo, _user_statement, values)

    async def change_user(
        self, adapter_key: str, platform_userid: str, changes: Mapping[str, Any]
    ) -> UserInfo:
        """Change a user, who is added when there is none."""
        values = _checked("user", changes, _USER_COLUMNS)
        new = insert(self._dialect, USERS).values(
            **{"username": "", "perm_level": 0, **values},
            adapter_key=adapter_key,
            platform_userid=platform_userid,
            created_at=now(),
            updated_at=now(),
        )
        statement = new.on_conflict_do_update(
            index_elements=[USERS.c.platform_userid, USERS.c.adapter_key],
            set_={**{name: new.excluded[name] for name in values}, "updated_at": new.excluded.updated_at},
        )
        return found(await self._one_or_none(UserInfo, statement.returning(USERS)), "user", platform_userid)

    async def see_user(self, adapter_key: str, platform_userid: str, *, username: str) -> UserInfo:
        """Return the user, with this name from now on."""
        user = await self.find_user(adapter_key, platform_userid)
        if user is not None and user.username == username:
            return user
        return await self.change_user(adapter_key, platform_userid, {"username": username})

    async def delete_user(self, user_id: int) -> bool:
        """Delete a user; False when there is none."""
        return await self._count(delete(USERS).where(USERS.c.id == user_id)) > 0

    async def presets(self, *, preset_id: int | None, limit: int) -> list[PresetInfo]:
        """Return presets, oldest first; a filter of None matches all."""
        statement = select(PRESETS)
        if preset_id is not None:
            statement = statement.where(PRESETS.c.id == preset_id)
        return await self._all(PresetInfo, statement.order_by(PRESETS.c.id).limit(limit))

    async def add_preset(self, values: Mapping[str, Any], *, once_key: str) -> PresetInfo:
        """Add a preset, unless there is one with its ``once_key``; returns the stored one."""
        given = _checked("preset", values, _PRESET_COLUMNS)
        new = insert(self._dialect, PRESETS).values(
            **given, once_key=once_key, created_at=now(), updated_at=now()
        )
        added = await self._one_or_none(PresetInfo, new.on_conflict_do_nothing().returning(PRESETS))
        if added is not None:
            return added
        known = select(PRESETS).where(PRESETS.c.once_key == once_key)
        return found(await self._one_or_none(PresetInfo, known), "preset", str(given.get("name")))

    async def change_preset(self, preset_id: int, changes: Mapping[str, Any]) -> bool:
        """Change a preset; False when there is none."""
        values = _checked("preset", changes, _PRESET_COLUMNS)
        statement = update(PRESETS).where(PRESETS.c.id == preset_id)
        return await self._count(statement.values(**values, updated_at=now())) > 0

    async def delete_preset(self, preset_id: int) -> bool:
        """Delete a preset; False when there is none."""
        return await self._count(delete(PRESETS).where(PRESETS.c.id == preset_id)) > 0


def _checked(noun: str, changes: Mapping[str, Any], allowed: frozenset[str]) -> dict[str, Any]:
    unknown = sorted(changes.keys() - allowed)
    if unknown:
        raise InvalidValueError(
            f"{unknown[0]} of a {noun} cannot be changed; plugins may change {', '.join(sorted(allowed))}"
        )
    return dict(changes)


@FixedStatement
def _user_statement(_dialect: str) -> Executable:
    return select(USERS).where(
        USERS.c.platform_userid == bindparam("of_user"), USERS.c.adapter_key == bindparam("of_adapter")
    )
