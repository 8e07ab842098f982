"""The model of the agent's persona that plugins of the reference query."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel

from nekro_agent.core.config import config
from nekro_agent.models.base import QueryModel

__all__ = ["DBPreset", "DefaultPreset"]


class DefaultPreset(BaseModel):
    """The only persona of this installation (``NEKRO_AGENT__PERSONA``)."""

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
    """A stored persona; this system has none but the configured one."""

    id: int
    name: str
    title: str = ""
    content: str = ""
    description: str = ""

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        return []
