"""The model of the agent's personas that plugins of the reference query."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel

from nekro_agent import runtime
from nekro_agent.core.config import config
from nekro_agent.models.base import MAX_ROWS, QueryModel
from nekro_agent.records import PRESET_FIELDS

__all__ = ["DBPreset", "DefaultPreset"]


class DefaultPreset(BaseModel):
    """The persona of chats that have no preset of their own (``NEKRO_AGENT__PERSONA``)."""

    id: int = -1
    name: str
    title: str = ""
    content: str
    description: str = ""

    @classmethod
    def current(cls) -> Self:
        """Return the persona as currently configured."""
        return cls(name=config.AI_CHAT_PRESET_NAME, content=config.AI_CHAT_PRESET_SETTING)


class DBPreset(QueryModel):
    """A stored persona; ``DBChatChannel.set_preset`` makes it that of a chat."""

    _changeable = frozenset(PRESET_FIELDS)

    id: int = 0
    remote_id: str | None = None
    on_shared: bool = False
    name: str
    title: str = ""
    avatar: str = ""
    content: str = ""
    description: str = ""
    #: Comma-separated.
    tags: str = ""
    author: str = ""
    ext_data: Any = None
    create_time: datetime | None = None
    update_time: datetime | None = None

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        records = runtime.current().service("records")
        wanted = equal.get("id")
        rows = await records.presets(preset_id=wanted if isinstance(wanted, int) else None, limit=MAX_ROWS)
        return [cls._of(row) for row in rows]

    async def _insert(self) -> Self:
        values = {name: getattr(self, name) for name in PRESET_FIELDS}
        return self._of(await runtime.current().service("records").add_preset(values))

    async def _update(self, changes: dict[str, Any]) -> None:
        await runtime.current().service("records").change_preset(self.id, changes)

    async def _remove(self) -> bool:
        return await runtime.current().service("records").delete_preset(self.id)
