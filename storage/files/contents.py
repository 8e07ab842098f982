"""Moves contents between a host's cache and the store.

Storing a content is three steps: announce its row, upload what the store lacks, mark the row. A process that
is killed between them leaves a row that is not marked. The next one that needs the content, on any host,
uploads it again, a large one without the parts that are stored. Nothing is served without a computed hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from nekro.base.metrics import metrics
from nekro_agent.errors import DamagedFileError, StorageUnavailableError
from nekro_agent.files.names import HEAD_BYTES, told_type
from storage.engine import Database
from storage.files.cache import CachedContent, FileCache
from storage.files.content_rows import Content
from storage.files.stores.store import PART_BYTES, ObjectStore

__all__ = ["ContentStore", "verified"]

#: Requests at a time of one process; each holds an object in memory.
_REQUESTS: Final = 8
_CHUNK_BYTES: Final = 1 << 20


class _Part(NamedTuple):
    """An object's bytes in a file."""

    sha256: str
    bytes: int
    path: Path
    offset: int


class ContentStore:
    """The contents of a host: its cache, and the store behind it. Use it in one event loop."""

    def __init__(self, database: Database, store: ObjectStore, cache: FileCache) -> None:
        self.cache = cache
        self._database = database
        self._store = store
        self._requests = asyncio.Semaphore(_REQUESTS)

    async def put(self, contents: Iterable[CachedContent]) -> dict[str, Content]:
        """Store contents that the store lacks; returns their rows by SHA-256.

        An entry that needs them must be committed within the grace time of collections.

        Raises:
            StorageUnavailableError: the store or the database did not answer; a repetition resumes.
        """
        by_hash = {content.sha256: content for content in contents}
        rows = await self._announce({sha256: content.bytes for sha256, content in by_hash.items()})
        missing = [by_hash[row.sha256] for row in rows.values() if not row.is_stored]
        whole = {content.sha256: [_whole(content)] for content in missing if content.bytes <= PART_BYTES}
        await self._upload([parts[0] for parts in whole.values()], rows)
        for content in missing:
            if content.bytes > PART_BYTES:
                parts = await asyncio.to_thread(_split, content)
                of_parts = await self._announce({part.sha256: part.bytes for part in parts})
                await self._upload(parts, of_parts)
                async with self._database.begin() as tx:
                    row = rows[content.sha256]
                    await tx.contents.add_parts(row.id, [of_parts[part.sha256].id for part in parts])
        return rows

    async def put_bytes(self, data: bytes) -> Content:
        """Store the bytes of one object, at most ``PART_BYTES``; may raise as ``put``."""
        sha256 = await asyncio.to_thread(_digest_of, data)
        row = (await self._announce({sha256: len(data)}))[sha256]
        if not row.is_stored:
            async with self._requests:
                await self._store.put(row.key, data)
            metrics().files_stored_bytes.inc(len(data))
            async with self._database.begin() as tx:
                await tx.contents.mark_stored({row.id: told_type(data[:HEAD_BYTES])})
        return row

    async def join(self, sha256: str, parts: Sequence[Content]) -> Content:
        """Return the content that consists of stored parts, whose bytes together have this SHA-256."""
        row = (await self._announce({sha256: sum(part.bytes for part in parts)}))[sha256]
        if not row.is_stored:
            async with self._database.begin() as tx:
                await tx.contents.add_parts(row.id, [part.id for part in parts])
        return row

    async def read_part(self, part: Content, *, name: str) -> bytes:
        """Return the verified bytes of one object; may raise as ``fetch``."""
        async with self._requests:
            data = await self._store.get(part.key)
        try:
            verified_data = await asyncio.to_thread(verified, data, part.sha256, name=name)
        except DamagedFileError:
            metrics().files_damaged.inc()
            raise
        metrics().files_fetched_bytes.inc(len(verified_data))
        return verified_data

    async def fetch(self, content_id: int, sha256: str, size: int, *, name: str) -> CachedContent:
        """Return a content in the cache, from the store if it is not there yet.

        Args:
            name: the file, for errors.

        Raises:
            DamagedFileError: the store lacks the content, or has another one.
            StorageUnavailableError: the store or the database did not answer.
        """
        found = await asyncio.to_thread(self.cache.find, sha256, size)
        metrics().files_cache_reads.labels("miss" if found is None else "hit").inc()
        if found is not None:
            return found
        content = Content(id=content_id, sha256=sha256, bytes=size, is_stored=True)
        parts = [content]
        if size > PART_BYTES:
            async with self._database.read() as tx:
                parts = await tx.contents.parts(content_id)
        digest = hashlib.sha256()
        with self.cache.new_file() as file:
            async for data in self._read(parts, name=name):
                await asyncio.to_thread(_append, file, digest, data)
            if digest.hexdigest() != sha256:
                metrics().files_damaged.inc()
                raise DamagedFileError(name=name, sha256=sha256, found=f"SHA-256 {digest.hexdigest()}")
            return await asyncio.to_thread(self.cache.keep, file, sha256)

    async def _announce(self, sizes: dict[str, int]) -> dict[str, Content]:
        async with self._database.begin() as tx:
            return await tx.contents.announce(sizes)

    async def _upload(self, parts: Sequence[_Part], rows: dict[str, Content]) -> None:
        missing = {part.sha256: part for part in parts if not rows[part.sha256].is_stored}
        #: Media types by content.
        done: dict[int, str | None] = {}
        failures: list[BaseException] = []

        async def upload(part: _Part) -> None:
            async with self._requests:
                if failures:  # a store that does not answer would keep each of the others waiting, too
                    return
                try:
                    data = await asyncio.to_thread(_read_part, part)
                    await self._store.put(rows[part.sha256].key, data)
                except BaseException as exc:
                    failures.append(exc)
                    raise
            done[rows[part.sha256].id] = told_type(data[:HEAD_BYTES])
            metrics().files_stored_bytes.inc(part.bytes)

        await asyncio.gather(*map(upload, missing.values()), return_exceptions=True)
        if done:
            async with self._database.begin() as tx:
                await tx.contents.mark_stored(done)
        for failure in failures:
            raise failure

    async def _read(self, parts: Sequence[Content], *, name: str) -> AsyncIterator[bytes]:
        """Yield the verified bytes of parts in order; the next ones are requested meanwhile."""
        ahead: list[asyncio.Task[bytes]] = []
        waiting = iter(parts)
        try:
            while True:
                while len(ahead) < _REQUESTS // 2 and (part := next(waiting, None)) is not None:
                    ahead.append(asyncio.create_task(self.read_part(part, name=name)))
                if not ahead:
                    return
                yield await ahead.pop(0)
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)


def verified(data: bytes | None, sha256: str, *, name: str) -> bytes:
    """Return the bytes of an object; None means that the store has none.

    Raises:
        DamagedFileError: they have another hash.
    """
    if data is None:
        raise DamagedFileError(name=name, sha256=sha256, found="the store has no such object")
    if (digest := _digest_of(data)) != sha256:
        raise DamagedFileError(name=name, sha256=sha256, found=f"SHA-256 {digest}")
    return data


def _whole(content: CachedContent) -> _Part:
    return _Part(content.sha256, content.bytes, content.path, 0)


def _split(content: CachedContent) -> list[_Part]:
    parts = []
    for offset in range(0, content.bytes, PART_BYTES):
        size = min(PART_BYTES, content.bytes - offset)
        data = _read_part(_Part("", size, content.path, offset))
        parts.append(_Part(_digest_of(data), size, content.path, offset))
    return parts


def _read_part(part: _Part) -> bytes:
    try:
        with part.path.open("rb") as file:
            os.utime(file.fileno())  # an upload may take longer than the cache keeps what is not used
            file.seek(part.offset)
            return file.read(part.bytes)
    except FileNotFoundError as exc:
        raise StorageUnavailableError(
            f"{part.path} was removed from the cache before it was stored; repeat the change, and if that "
            "happens again, raise NEKRO_FILES__CACHE_BYTES"
        ) from exc


def _digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _append(file: IO[bytes], digest: hashlib._Hash, data: bytes) -> None:
    digest.update(data)
    file.write(data)
