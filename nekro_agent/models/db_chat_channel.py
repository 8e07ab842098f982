"""The chat model that plugins of the reference query."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NoReturn, Self

from nekro_agent import runtime
from nekro_agent.core.config import config
from nekro_agent.errors import InvalidValueError
from nekro_agent.layout import channel_of
from nekro_agent.models.base import MAX_ROWS, QueryModel, stable_id
from nekro_agent.models.db_preset import DBPreset, DefaultPreset
from nekro_agent.ports import ChatInfo
from nekro_agent.runtime import CoreConfig
from nekro_agent.schemas.chat_message import ChatType

__all__ = ["ChannelStatus", "DBChatChannel", "DefaultPreset"]

_COLUMNS = (
    "adapter_key",
    "channel_id",
    "channel_name",
    "channel_type",
    "preset_id",
    "is_active",
    "observe_mode",
)


class ChannelStatus(StrEnum):
    """What the agent does in a chat."""

    ACTIVE = "active"
    #: Reads along and starts no turns.
    OBSERVE = "observe"
    #: Starts no turns.
    DISABLED = "disabled"


class DBChatChannel(QueryModel):
    """One chat."""

    _changeable = frozenset((*_COLUMNS, "conversation_start_time"))

    id: int = 0
    chat_key: str
    adapter_key: str = ""
    channel_id: str = ""
    channel_name: str = ""
    channel_type: str = ""
    #: Names the sandbox area of the chat; None while nothing is recorded for the chat.
    container_key: str | None = None
    is_active: bool = True
    observe_mode: bool = False
    #: The stored preset that is the agent's persona here; None means the default one.
    preset_id: int | None = None
    workspace_id: int | None = None
    data: str = "{}"
    #: Prompts show messages from here on; saving another time begins a new conversation now.
    conversation_start_time: datetime = datetime.fromtimestamp(0, UTC)
    create_time: datetime | None = None
    update_time: datetime | None = None

    @property
    def chat_type(self) -> ChatType:
        """Private or group."""
        return ChatType.of(self.channel_type or None)

    @property
    def channel_status(self) -> ChannelStatus:
        """What the agent does here."""
        if not self.is_active:
            return ChannelStatus.DISABLED
        return ChannelStatus.OBSERVE if self.observe_mode else ChannelStatus.ACTIVE

    @property
    def adapter(self) -> NoReturn:
        """Raise an error, because a worker has no adapter objects.

        Raises:
            InvalidValueError: always; ``adapter_key`` names the adapter.
        """
        raise InvalidValueError("a worker has no adapter objects; adapter_key names the adapter")

    @classmethod
    async def get_channel(cls, chat_key: str) -> Self:
        """Return the chat; an unknown chat has only its key and what the key says."""
        return await cls.get_or_none(chat_key=chat_key) or cls._unknown(chat_key)

    @classmethod
    async def get_or_create(  # type: ignore[override]  # the reference's model differs from its base here
        cls, adapter_key: str, channel_id: str, channel_type: ChatType | str, channel_name: str = ""
    ) -> Self:
        """Return the chat ``<adapter_key>-<channel_id>``, recorded with this type and name."""
        changes = {
            "adapter_key": adapter_key,
            "channel_id": channel_id,
            "channel_type": str(channel_type),
            "channel_name": channel_name,
        }
        given = {name: value for name, value in changes.items() if value}
        records = runtime.current().service("records")
        return cls._of(await records.change_chat(f"{adapter_key}-{channel_id}", given))

    async def get_channel_name(self) -> str:
        """Return the name of the channel, or its key."""
        return self.channel_name or self.chat_key

    async def get_preset(self) -> DefaultPreset | DBPreset:
        """Return the persona of the agent in this chat."""
        preset = await DBPreset.get_or_none(id=self.preset_id) if self.preset_id is not None else None
        return preset or DefaultPreset.current()

    async def set_preset(self, preset_id: int | None = None) -> str:
        """Choose the agent's persona in this chat and return a text for people that names it.

        Args:
            preset_id: id of a stored preset; None and -1 mean the default one.

        Raises:
            InvalidValueError: no preset has this id.
        """
        wanted = None if preset_id in (None, -1) else preset_id
        if wanted is not None and await DBPreset.get_or_none(id=wanted) is None:
            raise InvalidValueError(f"there is no preset {wanted}; DBPreset.create stores one")
        self.preset_id = wanted
        await self.save()
        return f"The preset is now: {(await self.get_preset()).name}"

    async def get_effective_config(self) -> CoreConfig:
        """Return the configuration of this chat, which is the global one."""
        return config

    async def set_active(self, is_active: bool) -> None:
        """Let the agent take part, or disable it here."""
        self.is_active = is_active
        if not is_active:
            self.observe_mode = False
        await self.save()

    async def set_channel_status(self, status: ChannelStatus | str) -> None:
        """Choose what the agent does here.

        Raises:
            ValueError: there is no such status.
        """
        wanted = ChannelStatus(status)
        self.is_active = wanted is not ChannelStatus.DISABLED
        self.observe_mode = wanted is ChannelStatus.OBSERVE
        await self.save()

    async def reset_channel(self) -> None:
        """Begin a new conversation and run the plugins' reset hooks; the running round continues."""
        bound = runtime.current()
        await bound.service("records").reset_chat(self.chat_key)
        if bound.hooks is not None:
            await bound.hooks.on_channel_reset(self.chat_key)

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        records = runtime.current().service("records")
        return [cls._of(chat) for chat in await records.chats(chat_key=equal.get("chat_key"), limit=MAX_ROWS)]

    @classmethod
    def _of(cls, record: ChatInfo, **others: Any) -> Self:
        created = record.created_at or datetime.fromtimestamp(0, UTC)
        return super()._of(
            record,
            id=stable_id(record.chat_key),
            # Whole seconds, as those of messages: nothing precedes the chat's first message.
            conversation_start_time=record.reset_at or created.replace(microsecond=0),
            create_time=created,
            update_time=record.reset_at or created,
            **_texts(record.adapter_key, record.channel_id, record.channel_type, record.channel_name),
            **others,
        )

    @classmethod
    def _unknown(cls, chat_key: str) -> Self:
        return cls._row(id=stable_id(chat_key), chat_key=chat_key, **_texts(*channel_of(chat_key), None))

    async def _insert(self) -> Self:
        given = {name: getattr(self, name) for name in _COLUMNS if name in self.model_fields_set}
        return self._of(await self._change({name: value for name, value in given.items() if value != ""}))

    async def _update(self, changes: dict[str, Any]) -> None:
        restarts = changes.pop("conversation_start_time", None) is not None
        await self._change(changes)
        if restarts:
            await runtime.current().service("records").reset_chat(self.chat_key)

    async def _change(self, changes: dict[str, Any]) -> ChatInfo:
        # Plugins write "" for what is not known, and the tables NULL.
        values = {name: None if value == "" else value for name, value in changes.items()}
        return await runtime.current().service("records").change_chat(self.chat_key, values)


def _texts(
    adapter_key: str | None, channel_id: str | None, channel_type: str | None, channel_name: str | None
) -> dict[str, str]:
    return {
        "adapter_key": adapter_key or "",
        "channel_id": channel_id or "",
        "channel_type": channel_type or "",
        "channel_name": channel_name or "",
    }
