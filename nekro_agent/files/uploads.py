"""Limits of a chat's uploads: a quota that every writer of this project respects, and a retention.

Usage is measured, not recorded: plugins may write to the directory directly, and their files count at the
next measurement. A file counts by its size or by its disk blocks, whichever is more, so a sparse file
counts with the size that it may reach. Space is reserved before anything is copied: under a lock between
processes a file of the whole size is created, which the next measurement includes. Any number of
concurrent writers thus stays within the quota, and the lock is held for one measurement, never while
content is copied.

The lock is one of 64 files of the data directory, chosen by the area's name. It is not in the area, where
sandboxed code, which sees the area read-only, could hold it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from nekro_agent import layout, runtime
from nekro_agent.errors import UploadQuotaError
from nekro_agent.files import safe_files
from nekro_agent.files.private_files import make_directory, modes_within, open_private
from nekro_agent.files.safe_paths import directory
from nekro_agent.runtime import UploadPolicy

__all__ = ["UploadArea", "area_of", "numbered", "remove_expired"]

_LOCKS: Final = 64
_CHUNK_BYTES: Final = 1 << 20
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Names of files that a writer has not finished, or that a killed one left behind.
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{16}\.(part|download)")
_MOST_NAMES: Final = 1_000_000


class UploadArea:
    """The host directory of one chat's uploads, with its quota."""

    def __init__(self, path: Path, policy: UploadPolicy | None = None) -> None:
        """
        Args:
            policy: None means the bound runtime's.
        """
        self.path = path
        if policy is None:
            policy = runtime.current().uploads if runtime.is_bound() else UploadPolicy()
        self._policy = policy

    def put(self, name: str, source: bytes | BinaryIO) -> None:
        """Store a file, replacing an existing file of its name; it appears complete or not at all.

        If a file grows while it is copied, only its size at the start is stored.

        Args:
            name: relative to the area; its directory exists.

        Raises:
            UploadQuotaError: it exceeds the quota.
            IsADirectoryError: a directory has that name.
        """
        size = len(source) if isinstance(source, bytes) else os.fstat(source.fileno()).st_size
        with directory(self.path) as area_fd:
            part, fd = self._reserve_new(area_fd, name, size)
            try:
                with os.fdopen(fd, "wb") as file:
                    safe_files.write_sparse(file, _chunks(source, size))
                self._rename(area_fd, part, name)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=area_fd)
                raise

    def add(self, name: str, source: bytes | BinaryIO, *, numbers: bool = True) -> str:
        """Store a file under a name that is not in use, and return that name.

        The name gets a number before its suffix (``plot-2.png``) if another file has it. A file of one of
        these names that has the same content is used instead of a copy.

        Args:
            numbers: whether the name may get a number.

        Raises:
            UploadQuotaError: it exceeds the quota.
            FileExistsError: the name is in use and may not get a number.
        """
        size = len(source) if isinstance(source, bytes) else os.fstat(source.fileno()).st_size
        digest = hashlib.sha256()
        with directory(self.path) as area_fd:
            part, fd = self._reserve_new(area_fd, name, size, replaces=False)
            try:
                with os.fdopen(fd, "wb") as file:
                    written = safe_files.write_sparse(file, _hashed(_chunks(source, size), digest))
                with self._locked():
                    names = numbered(name) if numbers else iter([name])
                    return self._name_free(area_fd, part, names, size=written, digest=digest.hexdigest())
            finally:
                with contextlib.suppress(FileNotFoundError):  # it has its name, or is not needed
                    os.unlink(part, dir_fd=area_fd)

    def _name_free(self, area_fd: int, part: str, names: Iterator[str], *, size: int, digest: str) -> str:
        candidate = ""
        for candidate in names:
            try:
                info = os.stat(candidate, dir_fd=area_fd, follow_symlinks=False)
            except FileNotFoundError:
                os.rename(part, candidate, src_dir_fd=area_fd, dst_dir_fd=area_fd)
                return candidate
            is_equal = stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_size == size
            if is_equal and _digest_of(area_fd, candidate) == digest:
                # Retention counts from the last use.
                os.utime(candidate, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=area_fd)
                return candidate
        raise FileExistsError(errno.EEXIST, "another file has this name", candidate)

    def new_download(self) -> Path:
        """Return an unused path in the area; :meth:`finish` gives the file its name."""
        return self.path / f".{secrets.token_hex(8)}.download"

    def finish(self, path: Path, name: str) -> None:
        """Rename a finished file of the area, replacing an existing file of the new name."""
        with directory(self.path) as area_fd:
            self._rename(area_fd, path.name, name)

    def finish_as_new(self, path: Path, name: str, *, size: int, sha256: str) -> str:
        """Rename a finished file of the area to a name that is not in use, as :meth:`add` does; returns it.

        If a file with the same content is used instead, the finished one is left.
        """
        with directory(self.path) as area_fd, self._locked():
            return self._name_free(area_fd, path.name, numbered(name), size=size, digest=sha256)

    def reserve(self, fd: int, *, part: Path, target: Path, size: int) -> None:
        """Extend an open file of the area to the size that it will have.

        Args:
            fd: descriptor of the file ``part``, which will be renamed to ``target``.

        Raises:
            UploadQuotaError: it exceeds the quota.
        """
        with directory(self.path) as area_fd, self._locked():
            self._check(area_fd, self._relative(target), size, without=self._relative(part))
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)

    @contextlib.contextmanager
    def publishing(self, *, part: Path, target: Path, size: int) -> Iterator[None]:
        """Check the size of a finished file again, and hold the lock while it is renamed.

        Raises:
            UploadQuotaError: it exceeds the quota.
        """
        with directory(self.path) as area_fd, self._locked():
            self._check(area_fd, self._relative(target), size, without=self._relative(part))
            yield

    def _reserve_new(self, area_fd: int, name: str, size: int, *, replaces: bool = True) -> tuple[str, int]:
        part = f".{secrets.token_hex(8)}.part"
        mode = modes_within(os.fstat(area_fd)).file
        with self._locked():
            self._check(area_fd, name, size, replaces=replaces)
            fd = os.open(part, _CREATE, mode, dir_fd=area_fd)
            try:
                os.fchmod(fd, mode)
                os.ftruncate(fd, size)
            except BaseException:
                os.close(fd)
                os.unlink(part, dir_fd=area_fd)
                raise
        return part, fd

    def _rename(self, area_fd: int, part: str, name: str) -> None:
        with self._locked():  # otherwise a sweep that found the old file expired could remove the new one
            os.rename(part, name, src_dir_fd=area_fd, dst_dir_fd=area_fd)

    def _check(
        self, area_fd: int, name: str, size: int, *, without: str | None = None, replaces: bool = True
    ) -> None:
        """Raise unless ``size`` bytes fit into the area.

        Args:
            name: of the new file.
            without: a file that does not count; None if all count.
            replaces: whether a file of the new one's name does not count either.
        """
        gone = {without, name if replaces else None}
        policy = self._policy
        used = names = 0
        for node in safe_files.walk(area_fd, max_entries=policy.chat_names + 2):
            if node.path in gone:
                continue
            used += _charge(node.info)
            names += 1
        if used + size > policy.chat_bytes or names + 1 > policy.chat_names:
            raise UploadQuotaError(
                name=name,
                size_bytes=size,
                used_bytes=used,
                limit_bytes=policy.chat_bytes,
                used_names=names,
                limit_names=policy.chat_names,
            )

    def _relative(self, path: Path) -> str:
        return str((path.parent.resolve() / path.name).relative_to(self.path.resolve()))

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        return _locked(self.path)


def area_of(path: Path) -> Path | None:
    """Return the chat's uploads directory that contains a host path; None if there is none."""
    base = layout.uploads_root(runtime.data_root())
    directory, root = path.parent.resolve(), base.resolve()
    if directory == root or not directory.is_relative_to(root):
        return None
    return base / directory.relative_to(root).parts[0]


def remove_expired(root: Path, *, before: float | None, unfinished_before: float, limit: int) -> int:
    """Remove files that have not changed since a given time from every chat's uploads; follows no links.

    The time is the ctime of a file (last change of its content, metadata or name), which programs cannot
    set. Directories are removed when they are as old and empty; those of the chats themselves stay.

    Args:
        before: seconds since the epoch; None keeps complete files.
        unfinished_before: the same for files that killed writers left behind.
        limit: most names to remove.

    Returns:
        The number of names removed; ``limit`` if there may be more.
    """
    removed = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(layout.uploads_root(root)) as entries:
        for entry in entries:
            if removed < limit and entry.is_dir(follow_symlinks=False):
                removed += _expire(Path(entry.path), before or 0, unfinished_before, limit - removed)
    return removed


def _expire(area: Path, before: float, unfinished_before: float, limit: int) -> int:
    removed = 0
    directories: list[str] = []
    with contextlib.suppress(FileNotFoundError), _locked(area), directory(area) as area_fd:
        for node in safe_files.walk(area_fd, max_entries=_MOST_NAMES):
            is_unfinished = _UNFINISHED.fullmatch(node.path) is not None
            if node.info.st_ctime >= (unfinished_before if is_unfinished else before):
                continue
            if stat.S_ISDIR(node.info.st_mode):
                directories.append(node.path)
            elif removed < limit:
                with contextlib.suppress(OSError):
                    os.unlink(node.name, dir_fd=node.parent_fd)
                    removed += 1
        for path in reversed(directories):  # a walk yields a directory before its content
            if removed < limit:
                removed += safe_files.remove_empty(area_fd, path)
    return removed


def _charge(info: os.stat_result) -> int:
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    return max(size, info.st_blocks * 512)


def _chunks(source: bytes | BinaryIO, size: int) -> Iterator[bytes]:
    """Yield at most ``size`` bytes."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    left = size
    while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
        left -= len(chunk)
        yield chunk


def _hashed(chunks: Iterable[bytes], digest: hashlib._Hash) -> Iterator[bytes]:
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def _digest_of(area_fd: int, name: str) -> str:
    with safe_files.open_file(area_fd, name) as file:
        return safe_files.sha256_of(file)


def numbered(name: str) -> Iterator[str]:
    """Yield the name, then it with numbers before its suffix, within the length of a file name."""
    yield name
    path = PurePosixPath(name)
    suffix = path.suffix if len(path.suffix.encode()) <= 32 else ""
    stem = name[: len(name) - len(suffix)]
    for number in itertools.count(2):
        tail = f"-{number}{suffix}"
        yield stem.encode()[: 255 - len(tail.encode())].decode(errors="ignore") + tail


@contextlib.contextmanager
def _locked(area: Path) -> Iterator[None]:
    number = hashlib.sha256(os.fsencode(area.name)).digest()[0] % _LOCKS
    path = layout.locks_dir(area.parent.parent) / f"uploads-{number}.lock"
    make_directory(path.parent)
    with open_private(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
