"""The contents of downloads in the store of hosts that share no disk: the SDK's ``DownloadParts`` port.

Each target has an area, ``downloads/<SHA-256 of the target>``. While the download runs, its files are the
parts that are stored, and ``state``, which says what they are parts of; each change is fenced by the lease of
the download. Afterwards it has one file, the whole content: its parts are those that are stored already.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Final

from loguru import logger
from pydantic import TypeAdapter, ValidationError

from nekro.app.background import BackgroundLoop
from nekro_agent.errors import DamagedFileError, DownloadError, StorageError
from nekro_agent.ports import PartialContent
from storage.driver.errors import outlasting
from storage.engine import Database
from storage.files.content_rows import Content
from storage.files.host_files import HostFiles
from storage.files.manifest import Entry
from storage.files.stores.store import PART_BYTES
from storage.transaction import Transaction

__all__ = ["StoredParts", "area_of"]

_AREAS: Final = "downloads/"
_PARTS: Final = "parts"
_STATE: Final = "state"
#: The whole content; downloads to other targets may use it if the server required no log-in or header.
_PUBLIC: Final = "content"
_PRIVATE: Final = "private"

#: A kill loses about half of it for each connection. The heap of a process grows with it: of 16 MiB, the
#: allocator keeps one or two for each thread that has read or written a part.
_DOWNLOAD_PART_BYTES: Final = PART_BYTES // 4

_adapter: Final = TypeAdapter(PartialContent)


def area_of(target: str) -> str:
    """Return the area of a download."""
    return f"{_AREAS}{hashlib.sha256(target.encode('utf-8', 'surrogateescape')).hexdigest()}"


class StoredParts:
    """Implements ``nekro_agent.ports.DownloadParts`` for one claim."""

    def __init__(
        self, database: Database, files: HostFiles, background: BackgroundLoop, *, target: str, fence: int
    ) -> None:
        self._database = database
        self._contents = files.contents
        self._background = background
        self._target = target
        self._fence = fence
        self._area = area_of(target)
        #: Paths that the area has.
        self._paths: set[str] = set()
        #: What the parts in the area are of, without them.
        self._of: PartialContent | None = None
        #: Stored parts by offset: those of the area, or of the whole content that was found.
        self._parts: dict[int, Content] = {}
        self._whole: Content | None = None
        #: The whole content as the area is to have it.
        self._finished: Entry | None = None
        self._changing = asyncio.Lock()

    @staticmethod
    def part_bytes(whole_bytes: int) -> int:
        """Return 4 MiB; a content that is one object is not divided."""
        return PART_BYTES if whole_bytes <= PART_BYTES else _DOWNLOAD_PART_BYTES

    async def find(self, sha256: str | None, *, is_public: bool) -> PartialContent | None:
        """Return the whole content with this digest, else what an earlier attempt stored."""
        return await self._background.wait(self._find(sha256, is_public))

    async def read(self, offset: int) -> bytes | None:
        """Return a verified part; None if the store lost or altered it."""
        return await self._background.wait(self._read(offset))

    async def put(self, of: PartialContent, offset: int, data: bytes) -> None:
        """Store a part; parts of another content are discarded."""
        await self._background.wait(self._put(of, offset, data))

    async def finish(
        self, sha256: str, size_bytes: int, *, read: Callable[[int, int], bytes], is_public: bool
    ) -> None:
        """Store the whole content; ``record`` lets the area have it."""
        await self._background.wait(self._finish(sha256, size_bytes, read, is_public))

    async def record(self, transaction: Transaction) -> None:
        """Let the area have the whole content instead of its parts, if it is stored.

        Call it last in the transaction that ends the claim, so that a process that takes over a
        download finds the parts if that has not ended.
        """
        if self._finished is not None:
            removed = self._paths - {self._finished.path}
            await transaction.files.commit(self._area, put=[self._finished], removed=removed)

    async def discard(self) -> None:
        """Forget the parts; errors are logged."""
        try:
            await self._background.wait(self._discard())
        except StorageError as exc:  # the next attempt or the sweep removes what is left
            logger.bind(target=self._target, error=str(exc)).warning("download_parts_not_discarded")

    @outlasting
    async def _find(self, sha256: str | None, is_public: bool) -> PartialContent | None:
        async with self._database.read() as tx:
            area = await tx.files.find(self._area)
            entries = [] if area is None else await tx.files.entries(area)
            self._paths = {entry.path for entry in entries}
            whole = None if sha256 is None else await self._shared(tx, sha256, is_public)
            if whole is not None:
                parts = await tx.contents.parts(whole.id) or [whole]
        if whole is None:
            return await self._unfinished(entries)
        self._whole = whole
        offset = 0
        for part in parts:
            self._parts[offset] = part
            offset += part.bytes
        return PartialContent(
            url="", sha256=sha256, validator=None, whole_bytes=whole.bytes, parts=self._sizes()
        )

    async def _shared(self, tx: Transaction, sha256: str, is_public: bool) -> Content | None:
        """Return a stored content that an ended download brought; a digest alone gives no other file."""
        content = await tx.contents.find(sha256)
        if content is None or not content.is_stored:
            return None
        for _, area, path in await tx.files.users_of([content.id]):
            is_own = area == self._area and path == _PRIVATE and not is_public
            if is_own or (area.startswith(_AREAS) and path == _PUBLIC):
                return content
        return None

    async def _unfinished(self, entries: Collection[Entry]) -> PartialContent | None:
        contents = {
            entry.path: Content(id=entry.content_id, sha256=entry.sha256, bytes=entry.bytes, is_stored=True)
            for entry in entries
            if entry.content_id is not None
        }
        state = contents.pop(_STATE, None)
        if state is None:
            return None
        try:
            data = await self._contents.read_part(state, name=f"{self._area}/{_STATE}")
            self._of = _adapter.validate_json(data)
        except (DamagedFileError, ValidationError) as exc:
            logger.bind(target=self._target, error=str(exc)).warning("download_parts_unreadable")
            return None
        for path, content in contents.items():
            offset = path.removeprefix(f"{_PARTS}/")
            if offset.isdecimal():
                self._parts[int(offset)] = content
        return replace(self._of, parts=self._sizes())

    async def _read(self, offset: int) -> bytes | None:
        try:
            return await self._contents.read_part(self._parts[offset], name=_path_of(offset))
        except DamagedFileError as exc:
            del self._parts[offset]
            self._whole = None
            logger.bind(target=self._target, error=str(exc)).warning("download_parts_unreadable")
            return None

    async def _put(self, of: PartialContent, offset: int, data: bytes) -> None:
        content = await self._contents.put_bytes(data)
        async with self._changing:
            put, removed = [_entry(_path_of(offset), content)], set[str]()
            if of != self._of:
                state = await self._contents.put_bytes(_adapter.dump_json(of))
                put.append(_entry(_STATE, state))
                removed = {path for path in self._paths if path.startswith(f"{_PARTS}/")}
                removed.discard(_path_of(offset))
            await self._commit(put, removed)
            if of != self._of:
                self._of, self._parts = of, {}
            self._parts[offset] = content

    async def _finish(
        self, sha256: str, size: int, read: Callable[[int, int], bytes], is_public: bool
    ) -> None:
        whole = self._whole
        if whole is None or whole.sha256 != sha256:
            whole = await self._joined(sha256, size, read)
        self._finished = _entry(_PUBLIC if is_public else _PRIVATE, whole)

    async def _joined(self, sha256: str, size: int, read: Callable[[int, int], bytes]) -> Content:
        """Store the whole content.

        All bytes are read again, and hashed as parts and as a whole: programs of a sandbox may be able to
        write to the partial file, and parts that do not belong together must not be stored under a digest.
        """
        digest = hashlib.sha256()
        parts, part_bytes = [], self.part_bytes(size)
        for offset in range(0, max(size, 1), part_bytes):
            data = await asyncio.to_thread(read, offset, min(part_bytes, size - offset))
            of_part = await asyncio.to_thread(_hashed, digest, data)
            known = self._parts.get(offset)
            is_known = known is not None and known.sha256 == of_part
            parts.append(known if known and is_known else await self._contents.put_bytes(data))
        if digest.hexdigest() != sha256:
            raise DownloadError(f"the unfinished file of {self._target!r} was changed by another process")
        return parts[0] if len(parts) == 1 else await self._contents.join(sha256, parts)

    @outlasting
    async def _discard(self) -> None:
        self._finished = None
        removed = {path for path in self._paths if path == _STATE or path.startswith(_PARTS)}
        async with self._changing:
            if removed:
                await self._commit([], removed)
            self._of, self._parts = None, {}

    async def _commit(self, put: list[Entry], removed: Collection[str]) -> None:
        async with self._database.begin() as tx:
            await tx.downloads.hold(self._target, fence=self._fence)
            await tx.files.commit(self._area, put=put, removed=removed)
        self._paths -= set(removed)
        self._paths |= {entry.path for entry in put}
        if any(path.startswith(f"{_PARTS}/") for path in self._paths):
            self._paths.add(_PARTS)

    def _sizes(self) -> dict[int, int]:
        return {offset: part.bytes for offset, part in self._parts.items()}


def _path_of(offset: int) -> str:
    return f"{_PARTS}/{offset}"


def _entry(path: str, content: Content) -> Entry:
    return Entry(path=path, content_id=content.id, sha256=content.sha256, bytes=content.bytes)


def _hashed(digest: hashlib._Hash, data: bytes) -> str:
    digest.update(data)
    return hashlib.sha256(data).hexdigest()
