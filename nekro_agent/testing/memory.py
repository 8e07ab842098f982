"""Files, stored values, messages and rows of the query models in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nekro_agent import layout
from nekro_agent.execution.current import effect_id
from nekro_agent.files.private_files import make_directory
from nekro_agent.ports import ChatInfo, IncomingMessage, MessageKind, OutgoingMessage, require_lengths
from nekro_agent.records import PluginValue, PresetInfo, StoredMessage, UserInfo

__all__ = [
    "InMemoryMessages",
    "InMemoryRecords",
    "InMemoryStore",
    "LocalAreas",
]


class LocalAreas:
    """Implements ``FileAreas``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def uploads_dir(self, chat_key: str) -> Path:
        """Host directory of ``/app/uploads``."""
        return make_directory(layout.uploads_dir(self._root, chat_key), passable=True)

    def shared_dir(self, container_key: str) -> Path:
        """Host directory of ``/app/shared``."""
        return make_directory(layout.shared_dir(self._root, container_key), passable=True)

    def plugin_dir(self, plugin_key: str) -> Path:
        """Directory of a plugin."""
        return make_directory(layout.plugin_dir(self._root, plugin_key))


class InMemoryStore:
    """Implements ``KeyValueStore``."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str, str], str] = {}

    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None."""
        return self._values.get((plugin_key, chat_key, user_key, store_key))

    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store a value; True if the key is new."""
        key = (plugin_key, chat_key, user_key, store_key)
        new = key not in self._values
        self._values[key] = value
        return new

    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """Delete a value; True if there was one."""
        return self._values.pop((plugin_key, chat_key, user_key, store_key), None) is not None

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin; returns their number."""
        keys = [key for key in self._values if key[0] == plugin_key]
        for key in keys:
            del self._values[key]
        return len(keys)

    def entries(self) -> list[PluginValue]:
        """Return every value, oldest key first."""
        return [
            PluginValue(plugin_key=plugin, chat_key=chat, user_key=user, store_key=key, value=value)
            for (plugin, chat, user, key), value in self._values.items()
        ]


@dataclass(kw_only=True)
class InMemoryMessages:
    """Implements ``Messages`` and ``Intake``."""

    #: Messages that plugins sent, in order.
    sent: list[OutgoingMessage] = field(default_factory=list)
    #: Every recorded message of every chat, in order.
    history: list[StoredMessage] = field(default_factory=list)
    #: Chats whose agent was triggered, in order.
    triggered: list[str] = field(default_factory=list)
    #: Messages recorded so far, deleted ones included.
    count: int = 0
    #: Ids that messages of plugins were given.
    _ids: set[str] = field(default_factory=set)

    async def send(self, message: OutgoingMessage) -> str:
        """Record a message of the agent."""
        require_lengths(message.text)
        if message.id is not None and not self._is_new(message.id):
            return message.id
        self.sent.append(message)
        if not message.record:
            return f"unrecorded-{len(self.sent)}"
        text = message.text or f"[{message.file_name}]"
        return self.add(message.chat_key, MessageKind.ASSISTANT, text, message_id=message.id)

    async def push_system(
        self,
        chat_key: str,
        text: str,
        *,
        trigger_agent: bool,
        call_id: str | None,
        message_id: str | None = None,
    ) -> str:
        """Record a system message."""
        require_lengths(text)
        if message_id is not None and not self._is_new(message_id):
            return message_id
        if trigger_agent:
            self.triggered.append(chat_key)
        return self.add(chat_key, MessageKind.SYSTEM, text, message_id=message_id)

    async def wake(self, chat_key: str) -> None:
        """Record that the chat's agent was triggered."""
        self.triggered.append(chat_key)

    async def receive(self, message: IncomingMessage) -> str | None:
        """Record a message of a person, without hooks; implements ``Intake``."""
        require_lengths(message.text)
        if message.is_tome:
            self.triggered.append(message.chat_key)
        return self.add(
            message.chat_key,
            MessageKind.USER,
            message.text,
            sender_id=message.user_id,
            sender_name=message.user_name,
            data={"is_tome": int(message.is_tome), "content_data": list(message.content_data)},
        )

    def add(
        self,
        chat_key: str,
        kind: MessageKind,
        text: str,
        *,
        sender_id: str | None = None,
        sender_name: str | None = None,
        message_id: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> str:
        """Record a message, for example one of a person; returns its id."""
        require_lengths(text, sender_id=sender_id, sender_name=sender_name, data=data)
        self.count += 1
        message = StoredMessage(
            sequence=self.count,
            id=message_id or f"m{self.count}",
            chat_key=chat_key,
            kind=kind,
            sender_id=sender_id,
            sender_name=sender_name,
            text=text,
            created_at=datetime.now(UTC),
            data=data,
        )
        self.history.append(message)
        return message.id

    def _is_new(self, message_id: str) -> bool:
        if message_id in self._ids:
            return False
        self._ids.add(message_id)
        return True

    def texts(self, chat_key: str, kind: MessageKind) -> list[str]:
        """Return the texts of a chat's messages of one kind."""
        return [m.text for m in self.history if m.chat_key == chat_key and m.kind is kind]


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
