"""Objects as files of a directory, which all hosts of a fleet must share if there are several."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from nekro_agent.errors import StorageError, StorageUnavailableError
from nekro_agent.files.private_files import make_directory, open_private
from storage.files.stores.store import PART_BYTES, StoredObject

__all__ = ["DirectoryStore"]

_Value = TypeVar("_Value")

_BATCH: Final = 1000
#: Names of files whose writer was killed, or is at work.
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{16}\.part")
_UNFINISHED_KEPT: Final = timedelta(days=1)


class DirectoryStore:
    """Implements ``ObjectStore``; a file per object, in 256 directories by the first letters of the keys."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, key: str, data: bytes) -> None:
        """Write a file, and let it appear when it is on the disk."""
        await self._run(lambda: self._write(key, data))

    async def get(self, key: str) -> bytes | None:
        """Read a file."""
        return await self._run(lambda: _found(lambda: _read(self._path(key))))

    async def size(self, key: str) -> int | None:
        """Return a file's size."""
        return await self._run(lambda: _found(lambda: self._path(key).stat().st_size))

    async def delete(self, keys: Collection[str]) -> None:
        """Remove files."""

        def remove() -> None:
            for key in keys:
                self._path(key).unlink(missing_ok=True)

        await self._run(remove)

    async def list(self) -> AsyncIterator[list[StoredObject]]:
        """Yield the files; remove those that killed writers left a day ago."""
        batches = _batches(self._objects())
        while (batch := await self._run(lambda: next(batches, None))) is not None:
            yield batch

    def _path(self, key: str) -> Path:
        return self._root / key[:2] / key

    def _write(self, key: str, data: bytes) -> None:
        path = self._path(key)
        make_directory(path.parent)
        part = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            with open_private(part, "xb") as file:
                file.write(data)
                file.flush()
                # A row that names the object must not survive a power loss that the object does not.
                os.fsync(file.fileno())
            part.rename(path)
            fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        finally:
            part.unlink(missing_ok=True)

    def _objects(self) -> Iterator[StoredObject]:
        before = time.time() - _UNFINISHED_KEPT.total_seconds()
        for directory in sorted(_found(partial(_names, self._root)) or ()):
            for path in _found(partial(_names, directory)) or ():
                info = _found(path.stat)
                if info is None:
                    continue
                if _UNFINISHED.fullmatch(path.name):
                    if info.st_mtime < before:
                        path.unlink(missing_ok=True)
                    continue
                modified_at = datetime.fromtimestamp(info.st_mtime, UTC)
                yield StoredObject(key=path.name, size_bytes=info.st_size, modified_at=modified_at)

    async def _run(self, work: Callable[[], _Value]) -> _Value:
        try:
            return await asyncio.to_thread(work)
        except OSError as exc:
            kind = StorageError if isinstance(exc, PermissionError) else StorageUnavailableError
            raise kind(f"the files in {self._root} cannot be used: {exc.strerror}") from exc


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(PART_BYTES + 1)


def _found(read: Callable[[], _Value]) -> _Value | None:
    """Return what ``read`` returns, or None if the file or directory does not exist."""
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _names(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def _batches(objects: Iterator[StoredObject]) -> Iterator[list[StoredObject]]:
    batch: list[StoredObject] = []
    for found in objects:
        batch.append(found)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
