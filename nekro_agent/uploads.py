"""What a chat's uploads may hold: a quota that every writer of this project keeps, and a retention.

Usage is measured, not recorded: plugins may write to the directory by themselves, and what they wrote
counts for the next one who asks. A file counts by its size or by its disk blocks, whichever is more, so
a sparse file counts as what it may become. Room is reserved before anything is copied: under a lock that
holds between processes, a file of the whole size is made, which the next measurement finds. So any
number of writers at a time stays within the quota, and the lock is held for one look at the directory,
never while content is copied.

The lock is one of 64 files of the data directory, chosen by the area's name. It does not lie in the area:
sandboxed code, which sees the area read-only, could hold it there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from nekro_agent import layout, runtime
from nekro_agent.errors import UploadQuotaError
from nekro_agent.policies import UploadPolicy
from nekro_agent.tools import safe_files
from nekro_agent.tools.private_files import make_directory, modes_within, open_private
from nekro_agent.tools.safe_open import directory

__all__ = ["UploadArea", "area_of", "remove_expired"]

_LOCKS: Final = 64
_CHUNK_BYTES: Final = 1 << 20
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: What a writer that was killed leaves behind.
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{16}\.(part|download)")
_MOST_NAMES: Final = 1_000_000


class UploadArea:
    """The host directory of one chat's uploads, with its quota."""

    def __init__(self, path: Path, policy: UploadPolicy | None = None) -> None:
        """
        Args:
            policy: None means that of the bound runtime.
        """
        self.path = path
        if policy is None:
            policy = runtime.current().uploads if runtime.is_bound() else UploadPolicy()
        self._policy = policy

    def put(self, name: str, source: bytes | BinaryIO) -> None:
        """Store a file in the place of whatever has its name; it appears complete or not at all.

        A file that grows while it is copied is stored as long as it was at the beginning.

        Args:
            name: relative to the area; its directory exists.

        Raises:
            UploadQuotaError: it does not fit.
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

    def new_download(self) -> Path:
        """Return a path in the area that nobody uses; :meth:`finish` gives the file its name."""
        return self.path / f".{secrets.token_hex(8)}.download"

    def finish(self, path: Path, name: str) -> None:
        """Give a finished file of the area its name, in the place of whatever has it."""
        with directory(self.path) as area_fd:
            self._rename(area_fd, path.name, name)

    def reserve(self, fd: int, *, part: Path, target: Path, size: int) -> None:
        """Make an open file of the area as large as it will become.

        Args:
            fd: of the file ``part``, which will be renamed to ``target``.

        Raises:
            UploadQuotaError: it does not fit.
        """
        with directory(self.path) as area_fd, self._locked():
            self._check(area_fd, self._relative(target), size, without=self._relative(part))
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)

    @contextlib.contextmanager
    def publishing(self, *, part: Path, target: Path, size: int) -> Iterator[None]:
        """Check the size of a finished file once more, and let nothing change while it is renamed.

        Raises:
            UploadQuotaError: it does not fit.
        """
        with directory(self.path) as area_fd, self._locked():
            self._check(area_fd, self._relative(target), size, without=self._relative(part))
            yield

    def _reserve_new(self, area_fd: int, name: str, size: int) -> tuple[str, int]:
        part = f".{secrets.token_hex(8)}.part"
        mode = modes_within(os.fstat(area_fd)).file
        with self._locked():
            self._check(area_fd, name, size)
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
        with self._locked():  # a sweep that found the old file expired must not remove the new one
            os.rename(part, name, src_dir_fd=area_fd, dst_dir_fd=area_fd)

    def _check(self, area_fd: int, name: str, size: int, *, without: str | None = None) -> None:
        """Raise unless ``size`` bytes fit into the area besides what is not ``name`` or ``without``."""
        policy = self._policy
        used = names = 0
        for node in safe_files.walk(area_fd, max_entries=policy.chat_names + 2):
            if node.path in (name, without):
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
    """Return the chat's uploads directory that a host path leads into; None when it leads to none."""
    base = layout.uploads_root(runtime.data_root())
    directory, root = path.parent.resolve(), base.resolve()
    if directory == root or not directory.is_relative_to(root):
        return None
    return base / directory.relative_to(root).parts[0]


def remove_expired(root: Path, *, before: float | None, unfinished_before: float, limit: int) -> int:
    """Remove what nothing changed since a time from every chat's uploads; links are not followed.

    By the time of the last change of a file or of its name, which no program can set. Directories
    go when they are as old and empty; those of the chats themselves stay.

    Args:
        before: seconds since the epoch; None keeps what is complete.
        unfinished_before: the same for what writers that were killed left behind.
        limit: names to remove at most.

    Returns:
        How many names went; ``limit`` when there may be more.
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
        for path in reversed(directories):  # a walk comes to a directory before what is in it
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


@contextlib.contextmanager
def _locked(area: Path) -> Iterator[None]:
    number = hashlib.sha256(os.fsencode(area.name)).digest()[0] % _LOCKS
    path = layout.locks_dir(area.parent.parent) / f"uploads-{number}.lock"
    make_directory(path.parent)
    with open_private(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
