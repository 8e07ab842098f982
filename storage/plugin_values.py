"""Values of plugins: the digest that identifies one in SQL, and the statements on it."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Final

from sqlalchemy import Executable, bindparam, delete, literal_column, select

from nekro_agent.errors import InvalidValueError
from nekro_agent.store import MAX_KEY_CHARS
from storage.driver.statements import SingleStatement
from storage.sql import insert, now
from storage.tables import PLUGIN_VALUES

__all__ = ["DELETE", "GET", "SCOPE", "SET", "value_digest"]

#: The keys, in the order of the digest.
SCOPE: Final = ("plugin_key", "chat_key", "user_key", "store_key")

_pack_length: Final = struct.Struct(">Q").pack
#: Size of the digest cache: plugins reuse keys, and a digest takes a tenth of the time of reading a value.
_KNOWN_DIGESTS: Final = 4096


@lru_cache(_KNOWN_DIGESTS)
def value_digest(*keys: str) -> bytes:
    """Return SHA-256 of the four keys, each after its length, so that no two scopes are encoded alike."""
    parts: list[bytes] = []
    for name, key in zip(SCOPE, keys, strict=True):
        if len(key) > MAX_KEY_CHARS:
            raise InvalidValueError(f"{name} has {len(key)} characters, the limit is {MAX_KEY_CHARS}")
        encoded = key.encode("utf-8", "surrogatepass")
        parts.append(_pack_length(len(encoded)))
        parts.append(encoded)
    return hashlib.sha256(b"".join(parts)).digest()


def _get(_dialect: str) -> Executable:
    return select(PLUGIN_VALUES.c.value).where(PLUGIN_VALUES.c.digest == bindparam("of_digest"))


def _delete(_dialect: str) -> Executable:
    found = PLUGIN_VALUES.c.digest == bindparam("of_digest")
    return delete(PLUGIN_VALUES).where(found).returning(PLUGIN_VALUES.c.revision)


def _set(dialect: str) -> Executable:
    given = ("digest", *SCOPE, "value")
    new = insert(dialect, PLUGIN_VALUES).values(
        {
            **{name: bindparam(name) for name in given},
            "revision": literal_column("1"),
            "created_at": now(),
            "updated_at": now(),
        }
    )
    return new.on_conflict_do_update(
        index_elements=[PLUGIN_VALUES.c.digest],
        set_={
            "value": new.excluded.value,
            "revision": PLUGIN_VALUES.c.revision + literal_column("1"),
            "updated_at": new.excluded.updated_at,
        },
    ).returning(PLUGIN_VALUES.c.revision)


#: Returns the value of a digest.
GET: Final = SingleStatement(_get, writes=False)
#: Writes a row; returns its revision.
SET: Final = SingleStatement(_set, writes=True)
#: Deletes the row of a digest; returns its revision.
DELETE: Final = SingleStatement(_delete, writes=True)
