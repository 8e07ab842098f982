"""``plugin.store`` in memory."""

from __future__ import annotations

from nekro_agent.records import PluginValue

__all__ = ["InMemoryStore"]


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
