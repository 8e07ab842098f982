"""Rows that plugins of the reference read and change through its models, and the port to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from nekro_agent import layout
from nekro_agent.ports import ChatInfo, MessageKind

__all__ = ["PRESET_FIELDS", "PluginValue", "PresetInfo", "Records", "StoredMessage", "UserInfo"]


@dataclass(frozen=True, kw_only=True)
class StoredMessage:
    """One message of a chat's history."""

    #: Grows with time within an installation.
    sequence: int
    id: str
    chat_key: str
    kind: MessageKind
    sender_id: str | None
    sender_name: str | None
    text: str
    created_at: datetime
    #: Plain JSON values besides the columns, where they differ from the defaults: ``is_tome`` (1 for people's
    #: messages), ``content_data``, ``ext_data``, ``is_recalled``, ``raw_cq_code``, ``message_id`` and
    #: ``sender_nickname`` of the platform, the attached file, and ``is_posted``: a message of the agent that
    #: its plugin has posted to the platform itself, so that a connector does not post it again.
    data: Mapping[str, Any] | None = None
    #: Of the chat; from its key where nothing is recorded, as in ``ChatInfo``.
    adapter_key: str | None = None
    channel_type: str | None = None

    def __post_init__(self) -> None:
        channel = layout.channel_of(self.chat_key)
        for name in ("adapter_key", "channel_type"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(channel, name))


@dataclass(frozen=True, kw_only=True)
class PluginValue:
    """One value of ``plugin.store``."""

    plugin_key: str
    chat_key: str
    user_key: str
    store_key: str
    value: str
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class UserInfo:
    """A person who has written in a chat of an adapter; ``""`` is the adapter of chats without one."""

    id: int
    adapter_key: str
    platform_userid: str
    username: str
    perm_level: int = 0
    #: None means not banned.
    ban_until: datetime | None = None
    #: None means no restriction.
    prevent_trigger_until: datetime | None = None
    ext_data: Any = None
    created_at: datetime | None = None
    updated_at: datetime | None = None

    def may_trigger(self, now: datetime) -> bool:
        """Whether messages of this person start turns at an aware time."""
        limits = (self.ban_until, self.prevent_trigger_until)
        return all(until is None or now > until for until in limits)


@dataclass(frozen=True, kw_only=True)
class PresetInfo:
    """A stored persona."""

    id: int
    name: str
    title: str = ""
    avatar: str = ""
    content: str = ""
    description: str = ""
    #: Comma-separated.
    tags: str = ""
    author: str = ""
    remote_id: str | None = None
    on_shared: bool = False
    ext_data: Any = None
    created_at: datetime | None = None
    updated_at: datetime | None = None


#: The fields of a preset that plugins set.
PRESET_FIELDS: Final = (
    "name",
    "title",
    "avatar",
    "content",
    "description",
    "tags",
    "author",
    "remote_id",
    "on_shared",
    "ext_data",
)


class Records(Protocol):
    """The tables that plugins of the reference use through its models.

    ``changes`` maps names of fields to new values; fields that it does not name keep theirs.
    """

    async def messages(
        self, *, chat_key: str | None, since: datetime | None, limit: int
    ) -> list[StoredMessage]:
        """Return the newest messages, newest first; of all chats if ``chat_key`` is None."""
        ...

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
        """Append a message to a chat's history, without hooks and without a turn.

        Args:
            message_id: None gives it a new id; the message of an id that exists is returned unchanged.
        """
        ...

    async def change_message(self, message_id: str, changes: Mapping[str, Any]) -> bool:
        """Change ``text``, ``sender_name`` or ``data``; False if there is no such message."""
        ...

    async def delete_message(self, message_id: str) -> bool:
        """Delete a message; True if there was one."""
        ...

    async def chats(self, *, chat_key: str | None, limit: int) -> list[ChatInfo]:
        """Return chats, newest first; only that chat if ``chat_key`` is given."""
        ...

    async def change_chat(self, chat_key: str, changes: Mapping[str, Any]) -> ChatInfo:
        """Change fields of a chat, which is created if there is none; returns it."""
        ...

    async def reset_chat(self, chat_key: str) -> None:
        """Begin a new conversation: prompts no longer show the present messages."""
        ...

    async def plugin_values(
        self, *, plugin_key: str | None, store_key: str | None, chat_key: str | None, limit: int
    ) -> list[PluginValue]:
        """Return stored values; a filter that is None matches everything."""
        ...

    async def users(self, *, platform_userid: str | None, limit: int) -> list[UserInfo]:
        """Return users, oldest first; only those of that platform id if it is given."""
        ...

    async def change_user(
        self, adapter_key: str, platform_userid: str, changes: Mapping[str, Any]
    ) -> UserInfo:
        """Change fields of a user, who is added if there is none; returns the user."""
        ...

    async def delete_user(self, user_id: int) -> bool:
        """Delete a user; True if there was one."""
        ...

    async def presets(self, *, preset_id: int | None, limit: int) -> list[PresetInfo]:
        """Return presets, oldest first; only that one if ``preset_id`` is given."""
        ...

    async def add_preset(self, values: Mapping[str, Any]) -> PresetInfo:
        """Store a persona; ``name`` is needed."""
        ...

    async def change_preset(self, preset_id: int, changes: Mapping[str, Any]) -> bool:
        """Change a persona; False if there is none."""
        ...

    async def delete_preset(self, preset_id: int) -> bool:
        """Delete a persona; chats that used it have the persona of the settings. True if there was one."""
        ...
