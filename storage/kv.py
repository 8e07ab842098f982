"""The key-value store of plugins, on SQL."""

from __future__ import annotations

from sqlalchemy import delete, func, select

from broker_config.settings import StoreSettings
from nekro_agent.errors import InvalidValueError
from storage.driver.errors import outlasting
from storage.engine import Database
from storage.repositories.plugin_states import DELETE, GET, SET, value_digest
from storage.tables import PLUGIN_VALUES

__all__ = ["SqlKeyValueStore"]


class SqlKeyValueStore:
    """Implements ``nekro_agent.ports.KeyValueStore``; each call is one statement and one transaction.

    Any string is a legal key part or value and is returned unchanged, including NUL and lone
    surrogates. Only ``StoreSettings`` limits lengths.
    """

    def __init__(self, database: Database, limits: StoreSettings) -> None:
        self._database = database
        self._limits = limits

    @outlasting
    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None when there is none.

        Raises:
            InvalidValueError: a key is longer than the limit.
        """
        digest = self._digest(plugin_key, chat_key, user_key, store_key)
        value: str | None = await self._database.run(GET, {"of_digest": digest})
        return value

    @outlasting
    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store a value durably; True when the key is new, False when a value was replaced.

        Of concurrent calls for a new key exactly one returns True.

        Raises:
            InvalidValueError: a key or the value is longer than the limit.
        """
        digest = self._digest(plugin_key, chat_key, user_key, store_key)
        self._check_value(store_key, value)
        values = {
            "digest": digest,
            "plugin_key": plugin_key,
            "chat_key": chat_key,
            "user_key": user_key,
            "store_key": store_key,
            "value": value,
        }
        revision: int = await self._database.run(SET, values)
        return revision == 1

    @outlasting
    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """Delete a value; True when there was one.

        Raises:
            InvalidValueError: a key is longer than the limit.
        """
        digest = self._digest(plugin_key, chat_key, user_key, store_key)
        return await self._database.run(DELETE, {"of_digest": digest}) is not None

    async def count(self, plugin_key: str) -> int:
        """Return the number of values that a plugin has."""
        statement = select(func.count()).where(PLUGIN_VALUES.c.plugin_key == plugin_key)
        async with self._database.read() as tx:
            return int((await tx.connection.execute(statement)).scalar_one())

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin; returns how many."""
        statement = delete(PLUGIN_VALUES).where(PLUGIN_VALUES.c.plugin_key == plugin_key)
        async with self._database.autocommit() as tx:
            return (await tx.connection.execute(statement)).rowcount

    def _digest(self, plugin_key: str, chat_key: str, user_key: str, store_key: str) -> bytes:
        return value_digest(plugin_key, chat_key, user_key, store_key)

    def _check_value(self, store_key: str, value: str) -> None:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > self._limits.max_value_bytes:
            raise InvalidValueError(
                f"the value of {store_key[:40]!r} has {size} bytes, the limit is "
                f"{self._limits.max_value_bytes}; keep large data in the plugin's directory"
            )
