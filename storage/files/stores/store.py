"""What a store of objects provides.

An object is at most ``PART_BYTES`` long and never changes; a larger content is several objects
(``storage.files.contents``). So each request moves a bounded number of bytes, an upload or download that was
interrupted resumes at the first missing object, and no kind of store needs multipart uploads of its own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

__all__ = ["PART_BYTES", "ObjectStore", "StoredObject"]

#: Longest object. Contents are split at this size, so other values make other objects of the same content.
PART_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """An object in a listing."""

    key: str
    size_bytes: int
    #: By the clock of the store.
    modified_at: datetime


class ObjectStore(Protocol):
    """Immutable objects by key; safe to use from any number of processes at once.

    Keys consist of letters, digits and dots. All methods raise ``StorageUnavailableError`` if the store does
    not answer after repetitions, and ``StorageError`` if it refuses the request.
    """

    async def put(self, key: str, data: bytes) -> None:
        """Store an object; others see all of it or nothing.

        A key that exists is a success: a key names one content, and an answer that was lost is repeated.
        Stores that know conditional requests leave the old object.
        """
        ...

    async def get(self, key: str) -> bytes | None:
        """Return an object; None if there is none.

        Of one that is longer than ``PART_BYTES``, so that it was altered, only one byte more is read.
        """
        ...

    async def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if there is none."""
        ...

    async def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that do not exist are a success."""
        ...

    def list(self) -> AsyncIterator[list[StoredObject]]:
        """Yield all objects in batches. Listings may be out of date in both directions."""
        ...
