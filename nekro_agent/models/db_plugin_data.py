"""The model of ``plugin.store`` values that plugins of the reference query."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self

from nekro_agent import runtime
from nekro_agent.models.base import MAX_ROWS, QueryModel, stable_id
from nekro_agent.records import PluginValue
from nekro_agent.store import PluginStore

__all__ = ["DBPluginData"]


class DBPluginData(QueryModel):
    """One stored value; there is one per plugin, chat, user and key, so creating it again replaces it."""

    _changeable = frozenset(("data_value",))
    _record_names = QueryModel._record_names | {
        "data_key": "store_key",
        "data_value": "value",
        "target_chat_key": "chat_key",
        "target_user_id": "user_key",
    }

    id: int = 0
    plugin_key: str
    data_key: str
    data_value: str
    target_chat_key: str = ""
    target_user_id: str = ""
    create_time: datetime | None = None
    update_time: datetime | None = None

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        records = runtime.current().service("records")
        values = await records.plugin_values(
            plugin_key=equal.get("plugin_key"),
            store_key=equal.get("data_key"),
            chat_key=equal.get("target_chat_key"),
            limit=MAX_ROWS,
        )
        return [cls._of(value) for value in values]

    @classmethod
    def _of(cls, record: PluginValue, **others: Any) -> Self:
        row_id = stable_id(record.plugin_key, record.chat_key, record.user_key, record.store_key)
        return super()._of(record, id=row_id, **others)

    async def _insert(self) -> Self:
        await self._write()
        return await type(self).get(**self._address())

    async def _update(self, changes: dict[str, Any]) -> None:
        await self._write()

    async def _write(self) -> None:
        await PluginStore(self.plugin_key).set(
            chat_key=self.target_chat_key,
            user_key=self.target_user_id,
            store_key=self.data_key,
            value=self.data_value,
        )

    async def _remove(self) -> bool:
        return await runtime.current().store.delete(
            self.plugin_key,
            chat_key=self.target_chat_key,
            user_key=self.target_user_id,
            store_key=self.data_key,
        )

    def _address(self) -> dict[str, str]:
        return {
            "plugin_key": self.plugin_key,
            "data_key": self.data_key,
            "target_chat_key": self.target_chat_key,
            "target_user_id": self.target_user_id,
        }
