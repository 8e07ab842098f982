"""The key-value store of plugins, on SQL."""

from __future__ import annotations

import hashlib
from functools import cache

from sqlalchemy import Delete, Executable, bindparam, delete, func, select

from broker_config.settings import StoreSettings
from nekro_agent.errors import InvalidValueError
from storage.clock import now
from storage.engine import Database
from storage.models import PluginValueRow
from storage.upsert import insert

__all__ = ["SqlKeyValueStore"]


class SqlKeyValueStore:
    """Implements ``nekro_agent.ports.KeyValueStore``; each call is one statement and one transaction.

    Any string is a legal key part or value and comes back as it was, NUL and lone surrogates
    included. Lengths are limited by ``StoreSettings`` only.
    """

    def __init__(self, database: Database, limits: StoreSettings) -> None:
        self._database = database
        self._limits = limits

    async def get(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> str | None:
        """Return the value, or None when there is none.

        Raises:
            InvalidValueError: a key is longer than the limit.
        """
        digest = self._digest(plugin_key, chat_key, user_key, store_key)
        async with self._database.read() as tx:
            found = await tx.connection.execute(_get_statement(), {"of_digest": digest})
            value: str | None = found.scalar_one_or_none()
            return value

    async def set(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str, value: str) -> bool:
        """Store durably before returning; True when the key is new, False when it was there.

        Of any number of concurrent calls for a new key exactly one gets True.

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
        async with self._database.autocommit() as tx:
            statement = _set_statement(tx.connection.dialect.name)
            revision: int = (await tx.connection.execute(statement, values)).scalar_one()
            return revision == 1

    async def delete(self, plugin_key: str, *, chat_key: str, user_key: str, store_key: str) -> bool:
        """True when a value was deleted, False when there was none.

        Raises:
            InvalidValueError: a key is longer than the limit.
        """
        digest = self._digest(plugin_key, chat_key, user_key, store_key)
        return await self._delete(delete(PluginValueRow).where(PluginValueRow.digest == digest)) > 0

    async def count(self, plugin_key: str) -> int:
        """Return how many values a plugin has."""
        statement = select(func.count()).where(PluginValueRow.plugin_key == plugin_key)
        async with self._database.read() as tx:
            return int((await tx.connection.execute(statement)).scalar_one())

    async def purge(self, plugin_key: str) -> int:
        """Delete all values of a plugin; returns how many."""
        return await self._delete(delete(PluginValueRow).where(PluginValueRow.plugin_key == plugin_key))

    async def _delete(self, statement: Delete) -> int:
        async with self._database.autocommit() as tx:
            return (await tx.connection.execute(statement)).rowcount

    def _digest(self, plugin_key: str, chat_key: str, user_key: str, store_key: str) -> bytes:
        """SHA-256 of the four keys, each after its length, so that no two scopes look alike."""
        digest = hashlib.sha256()
        names = {"plugin_key": plugin_key, "chat_key": chat_key, "user_key": user_key, "store_key": store_key}
        for name, key in names.items():
            if len(key) > self._limits.max_key_chars:
                raise InvalidValueError(
                    f"{name} has {len(key)} characters, the limit is {self._limits.max_key_chars}; "
                    "shorten it or raise NEKRO_STORE__MAX_KEY_CHARS"
                )
            encoded = key.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        return digest.digest()

    def _check_value(self, store_key: str, value: str) -> None:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > self._limits.max_value_bytes:
            raise InvalidValueError(
                f"the value of {store_key[:40]!r} has {size} bytes, the limit is "
                f"{self._limits.max_value_bytes}; keep large data in the plugin's directory "
                "or raise NEKRO_STORE__MAX_VALUE_BYTES"
            )


@cache
def _get_statement() -> Executable:
    return select(PluginValueRow.value).where(PluginValueRow.digest == bindparam("of_digest"))


@cache
def _set_statement(dialect: str) -> Executable:
    given = ("digest", "plugin_key", "chat_key", "user_key", "store_key", "value")
    new = insert(dialect, PluginValueRow).values(
        {
            **{name: bindparam(name) for name in given},
            "revision": 1,
            "created_at": now(),
            "updated_at": now(),
        }
    )
    return new.on_conflict_do_update(
        index_elements=[PluginValueRow.digest],
        set_={
            "value": new.excluded.value,
            "revision": PluginValueRow.revision + 1,
            "updated_at": new.excluded.updated_at,
        },
    ).returning(PluginValueRow.revision)
