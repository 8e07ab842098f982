"""Contents on this host's disk, by SHA-256, within a bound.

Files of the cache are private, and only this project's own code reads them: programs get copies. The time of
a file's last use is its modification time. Several processes may use one directory; each measures it when it
has added a sixteenth of the bound, and removes what was not used for longest. What was used within minutes
stays, because it may be on its way to the store or to a directory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import IO, BinaryIO, Final

from nekro.base.metrics import metrics
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.files.private_files import make_directory, open_private
from nekro_agent.files.safe_files import sha256_of
from nekro_agent.files.safe_paths import directory

__all__ = ["CachedContent", "FileCache"]

_CHUNK_BYTES: Final = 1 << 20
_SHARE: Final = 16
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
#: Unfinished files are removed when their writer must have died.
_UNFINISHED: Final = timedelta(days=1)
_IN_USE: Final = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class CachedContent:
    """A content on the disk of this host; the file may be gone later."""

    sha256: str
    bytes: int
    path: Path


class FileCache:
    """A directory of contents; thread-safe. Its methods block."""

    def __init__(self, root: Path, *, max_bytes: int, in_use: timedelta = _IN_USE) -> None:
        """
        Args:
            max_bytes: bound of the files; what was used within ``in_use`` may exceed it.
        """
        self._in_use = in_use
        self._root = root
        self._max_bytes = max_bytes
        self._added = max_bytes  # measure before the first addition
        self._lock = Lock()

    def find(self, sha256: str, size: int) -> CachedContent | None:
        """Return a content, or None; it counts as used now.

        A file of another size is removed: the host lost power before all of it was on the disk.
        """
        path = self._path(sha256)
        try:
            os.utime(path)
            if path.stat().st_size == size:
                return CachedContent(sha256=sha256, bytes=size, path=path)
        except FileNotFoundError:
            return None
        path.unlink(missing_ok=True)
        return None

    def add(self, source: IO[bytes], *, most_bytes: int = sys.maxsize) -> CachedContent:
        """Copy a file from its position to its end; it may change meanwhile.

        Args:
            most_bytes: what follows them is not copied.

        Raises:
            StorageUnavailableError: as ``new_file``.
        """
        digest = hashlib.sha256()
        with self.new_file() as file:
            while chunk := source.read(min(_CHUNK_BYTES, most_bytes)):
                most_bytes -= len(chunk)
                digest.update(chunk)
                file.write(chunk)
            return self.keep(file, digest.hexdigest())

    def adopt(self, source: BinaryIO) -> CachedContent:
        """Add a file that no longer changes; one of ``open_unnamed`` is not copied.

        Raises:
            StorageUnavailableError: as ``new_file``.
        """
        # A file with a name belongs to others, who could change it in place.
        if source.tell() or os.fstat(source.fileno()).st_nlink:
            return self.add(source)
        digest = sha256_of(source)
        make_directory(self._root)
        path = self._root / f".{secrets.token_hex(8)}.part"
        try:
            with directory(self._root) as root_fd:
                # With a descriptor of a directory, the link is followed to the file.
                os.link(f"/proc/self/fd/{source.fileno()}", path.name, dst_dir_fd=root_fd)
        except OSError:  # another file system, or a kind of file that gets no name
            source.seek(0)
            return self.add(source)
        try:
            return self._placed(path, digest, os.fstat(source.fileno()).st_size)
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def new_file(self) -> Iterator[IO[bytes]]:
        """Open a private file for writing; ``keep`` adds it, otherwise it is removed at the end.

        Raises:
            StorageUnavailableError: the disk is full. What was not in use is then removed from the cache, so
                a repetition may succeed.
        """
        make_directory(self._root)
        path = self._root / f".{secrets.token_hex(8)}.part"
        try:
            with open_private(path, "x+b") as file:
                yield file
        except OSError as exc:
            if exc.errno not in _FULL:
                raise
            self.shrink(0)
            raise StorageUnavailableError(
                f"the disk of the files' cache {self._root} is full; free space on it"
            ) from exc
        finally:
            path.unlink(missing_ok=True)

    def keep(self, file: IO[bytes], sha256: str) -> CachedContent:
        """Add a file of ``new_file`` whose content has been verified."""
        file.flush()
        return self._placed(Path(file.name), sha256, os.fstat(file.fileno()).st_size)

    def remove(self, sha256: str) -> None:
        """Remove a content, if it is there."""
        self._path(sha256).unlink(missing_ok=True)

    def shrink(self, max_bytes: int) -> int:
        """Remove what was not used for longest until the rest fits; returns the bytes that are left."""
        before = (time.time() - self._in_use.total_seconds()) * 1e9
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        for used_ns, size, path in files:
            if left <= max_bytes or used_ns > before:
                break
            path.unlink(missing_ok=True)
            left -= size
        metrics().files_cache_bytes.set(left)
        return left

    def _placed(self, file: Path, sha256: str, size: int) -> CachedContent:
        self._make_room(size)
        path = self._path(sha256)
        make_directory(path.parent)
        os.rename(file, path)
        return CachedContent(sha256=sha256, bytes=size, path=path)

    def _path(self, sha256: str) -> Path:
        return self._root / sha256[:2] / sha256

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._added += size
            if self._added * _SHARE < self._max_bytes:
                return
            self._added = 0
        self.shrink(max(self._max_bytes - size, 0))

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use, size and path of each content; remove unfinished files of the dead."""
        for entry in _scan(self._root):
            if entry.is_dir(follow_symlinks=False):
                for file in _scan(Path(entry.path)):
                    with contextlib.suppress(FileNotFoundError):
                        info = file.stat(follow_symlinks=False)
                        yield info.st_mtime_ns, info.st_size, Path(file.path)
                continue
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < time.time() - _UNFINISHED.total_seconds():
                    os.unlink(entry.path)


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
