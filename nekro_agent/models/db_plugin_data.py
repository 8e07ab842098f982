"""The model of ``plugin.store`` values that plugins of the reference query."""

from __future__ import annotations

from typing import Any, Self

from nekro_agent import runtime
from nekro_agent.models.base import MAX_ROWS, QueryModel

__all__ = ["DBPluginData"]


class DBPluginData(QueryModel):
    """One stored value."""

    plugin_key: str
    target_chat_key: str
    target_user_id: str
    data_key: str
    data_value: str

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        values = (
            await runtime.current()
            .service("records")
            .plugin_values(
                plugin_key=equal.get("plugin_key"),
                store_key=equal.get("data_key"),
                chat_key=equal.get("target_chat_key"),
                limit=MAX_ROWS,
            )
        )
        return [
            cls(
                plugin_key=value.plugin_key,
                target_chat_key=value.chat_key,
                target_user_id=value.user_key,
                data_key=value.store_key,
                data_value=value.value,
            )
            for value in values
        ]

    async def delete(self) -> None:
        """Delete this value."""
        await runtime.current().store.delete(
            self.plugin_key,
            chat_key=self.target_chat_key,
            user_key=self.target_user_id,
            store_key=self.data_key,
        )
