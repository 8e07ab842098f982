"""The partial file of a download, and a state file beside it for resuming after a crash."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nekro_agent.errors import DownloadError, DownloadRefusedError, UploadQuotaError
from nekro_agent.files.private_files import make_directory, modes_within
from nekro_agent.files.uploads import UploadArea

__all__ = ["PartFile", "PartState", "Spans", "remove_stale", "remove_unfinished"]

_HASH_BYTES: Final = 4 << 20
#: How much hashed data stays in the page cache: data that are still being written cannot be dropped.
_CACHED_BYTES: Final = 16 << 20
_STATE_BYTES: Final = 1 << 20
#: How much more is reserved at a time if the whole size is unknown.
_RESERVED_BYTES: Final = 16 << 20
_PART_NAME: Final = re.compile(r"\..+\.[0-9a-f]{12}\.part(\.json|\.new)?", re.DOTALL)


class Spans:
    """The received byte ranges: disjoint ``[start, end)`` in order. Thread-safe."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[int, int]] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Add a range."""
        if start >= end:
            return
        with self._lock:
            merged = []
            for span in self._spans:
                if span[1] < start or span[0] > end:
                    merged.append(span)
                else:
                    start, end = min(start, span[0]), max(end, span[1])
            self._spans = sorted([*merged, (start, end)])

    def clear(self) -> None:
        """Remove all ranges."""
        with self._lock:
            self._spans = []

    def copy(self) -> list[tuple[int, int]]:
        """Return the ranges."""
        with self._lock:
            return list(self._spans)

    @property
    def total(self) -> int:
        """Number of received bytes."""
        return sum(end - start for start, end in self.copy())

    @property
    def prefix(self) -> int:
        """Number of received bytes from the beginning up to the first gap."""
        spans = self.copy()
        return spans[0][1] if spans and spans[0][0] == 0 else 0

    def missing(self, whole: int) -> list[tuple[int, int]]:
        """Return the gaps below ``whole``, in order."""
        gaps, position = [], 0
        for start, end in self.copy():
            if position < start:
                gaps.append((position, min(start, whole)))
            position = max(position, end)
        if position < whole:
            gaps.append((position, whole))
        return [gap for gap in gaps if gap[0] < gap[1]]


class PartState(BaseModel):
    """Properties of the content, and the byte ranges on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[2] = 2
    #: The file that has the content: a worker that lost its claim may still describe its own file.
    inode: int
    url: str
    sha256: str | None
    validator: str | None
    whole_bytes: int
    done: list[tuple[int, int]]


class PartFile:
    """The temporary file beside a target. Methods block, except where documented otherwise.

    Both names derive from the target's, so that the next attempt finds them in any process or host.
    Sandboxed code may be able to write to the directory: files are opened without following links, and
    a file with a second name or of another user is not used.

    A worker that was suspended may continue after another one has taken over. It then writes either the same
    content to the same file, or to a file that has lost its name; it does not touch the other's names.
    """

    def __init__(self, target: Path, *, area: UploadArea | None = None) -> None:
        """
        Args:
            area: uploads whose quota applies to the file; None if there is no quota.
        """
        self._area = area
        #: File size that is reserved in the area's quota.
        self._reserved = 0
        digest = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]
        self._target = target
        short = os.fsencode(target.name)[:100].decode("utf-8", "ignore")
        self._path = target.with_name(f".{short}.{digest}.part")
        self._state_path = self._path.with_name(f"{self._path.name}.json")
        self._file = -1
        self._hash_lock = threading.Lock()
        self._hash = hashlib.sha256()
        self._hashed = 0
        self.spans = Spans()

    def open(self) -> PartState | None:
        """Open the file of an earlier attempt and return its state, or create a new one and return None.

        Raises:
            DownloadError: the directory cannot be written to.
        """
        try:
            make_directory(self._target.parent)
            state = self._read_state()
            if state is not None and self._take_over(state):
                return state
            self._file = self._created()
        except OSError as exc:
            raise self._cannot_write(exc) from exc
        return None

    def restart(self) -> None:
        """Discard the content.

        Raises:
            DownloadError: another worker has taken over, or the directory cannot be written to.
        """
        self._require_name()
        with self._hash_lock:
            try:
                # A new file: a worker that lost its claim may still write to this one.
                new = self._created()
            except OSError as exc:
                raise self._cannot_write(exc) from exc
            os.dup2(new, self._file, inheritable=False)
            os.close(new)
            self._reserved = 0
            self.spans.clear()
            self._hash, self._hashed = hashlib.sha256(), 0

    def require_space(self, whole_bytes: int) -> None:
        """Check that the missing bytes fit on the disk.

        Raises:
            DownloadError: they do not.
            UploadQuotaError: the file exceeds the quota of the chat's uploads.
        """
        self._reserve(whole_bytes)
        missing, free = whole_bytes - self.spans.total, shutil.disk_usage(self._target.parent).free
        if missing > free:
            raise DownloadError(
                f"cannot write {self._target.name!r}: {missing} bytes remain to be written, "
                f"the disk has {free} bytes free"
            )

    def write(self, offset: int, *pieces: bytes | memoryview) -> None:
        """Write consecutive pieces at an offset; hash them if everything before them is hashed.

        Raises:
            DownloadError: the write failed, for example because the disk is full.
            UploadQuotaError: the file exceeds the quota of the chat's uploads.
        """
        position = offset
        self._reserve_ahead(offset + sum(map(len, pieces)))
        try:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    count = os.pwrite(self._file, view, position)
                    view, position = view[count:], position + count
            # Start writing to the disk now: otherwise ``save`` would wait for a second's worth of data, and
            # so would other processes that write to that disk.
            self._let_go(offset, position)
        except OSError as exc:
            raise self._cannot_write(exc) from exc
        self.spans.add(offset, position)
        if self._hashed == offset:  # otherwise it is read and hashed when the bytes before it are there
            self._hash_pieces(offset, pieces)

    def _reserve_ahead(self, end: int) -> None:
        """Reserve quota for content of unknown size, with some margin for what follows."""
        if self._area is None or end <= self._reserved:
            return
        try:
            self._reserve(end + _RESERVED_BYTES)
        except UploadQuotaError:
            self._reserve(end)

    def _reserve(self, size: int) -> None:
        if self._area is not None:
            self._area.reserve(self._file, part=self._path, target=self._target, size=size)
            self._reserved = size

    def _hash_pieces(self, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
        with self._hash_lock:
            if self._hashed != offset:
                return
            for piece in pieces:
                self._hash.update(piece)
                self._hashed += len(piece)
            self._forget_hashed()

    def save(self, state: PartState) -> None:
        """Record which bytes are on disk; they are flushed to the disk first.

        Raises:
            DownloadError: another worker has taken over, or it cannot be written.
        """
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            os.fdatasync(self._file)
            self._require_name()
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(state.model_dump_json())
            new.replace(self._state_path)
        except OSError as exc:
            raise self._cannot_write(exc) from exc

    def hash_more(self) -> bool:
        """Hash up to 4 MiB of the received prefix; False if all of it is hashed."""
        with self._hash_lock:
            size = min(self.spans.prefix - self._hashed, _HASH_BYTES)
            if size <= 0:
                return False
            data = os.pread(self._file, size, self._hashed)
            if not data:
                raise self._was_cut()
            self._hash.update(data)
            self._hashed += len(data)
            self._forget_hashed()
            return True

    def read(self, offset: int, size: int) -> bytes:
        """Return received bytes.

        Raises:
            DownloadError: the file is shorter than what was written to it.
        """
        data = os.pread(self._file, size, offset)
        if len(data) < size:
            raise self._was_cut()
        self._let_go(offset, offset + size)
        return data

    @property
    def inode(self) -> int:
        """Number of the open file."""
        return os.fstat(self._file).st_ino

    @property
    def is_hash_behind(self) -> bool:
        """Whether ``hash_more`` has something to hash; does not block."""
        return self.spans.prefix > self._hashed

    @property
    def hexdigest(self) -> str:
        """SHA-256 of the bytes hashed so far."""
        return self._hash.hexdigest()

    def verify(self, sha256: str | None, url: str) -> None:
        """Hash the rest and check the digest.

        Raises:
            DownloadError: the file is shorter than what was written to it.
            DownloadRefusedError: the digest is not the expected one.
        """
        while self.hash_more():
            pass
        if os.fstat(self._file).st_size < self.spans.total:
            raise self._was_cut()
        if sha256 is not None and self.hexdigest != sha256:
            raise DownloadRefusedError(f"{url}: content has SHA-256 {self.hexdigest}, expected {sha256}")

    def publish(self) -> None:
        """Move the file to its final name.

        Raises:
            DownloadError: another worker has taken over, or it cannot be moved there.
            UploadQuotaError: the file exceeds the quota of the chat's uploads.
        """
        try:
            if self._area is not None:  # more may be reserved than was received
                os.ftruncate(self._file, self.spans.total)
            os.fsync(self._file)
            self._require_name()
            with self._publishing():
                self._path.replace(self._target)
        except OSError as exc:
            raise self._cannot_write(exc) from exc
        self._state_path.unlink(missing_ok=True)

    def _publishing(self) -> AbstractContextManager[None]:
        if self._area is None:
            return nullcontext()
        size = os.fstat(self._file).st_size
        return self._area.publishing(part=self._path, target=self._target, size=size)

    def close(self, *, keep: bool) -> None:
        """Close the file; remove it unless a later attempt should continue it, or another worker has it."""
        is_here = self._file < 0 or self._has_name()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if is_here and not keep:
            for path in (self._state_path, self._path):
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _read_state(self) -> PartState | None:
        try:
            descriptor = os.open(self._state_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:  # missing, or a link
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                return PartState.model_validate_json(file.read(_STATE_BYTES))
            except ValidationError:
                return None

    def _take_over(self, state: PartState) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        found = os.fstat(self._file)
        end = max((end for _, end in state.done), default=0)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
        is_described = found.st_ino == state.inode and end <= min(found.st_size, state.whole_bytes)
        if not (is_ours and is_described):
            os.close(self._file)
            self._file = -1
            return False
        self.spans = Spans(state.done)
        return True

    def _created(self) -> int:
        """Create an empty file in place of any earlier one; returns its descriptor."""
        self._state_path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._path, flags, modes_within(self._path.parent.stat()).file)

    def _has_name(self) -> bool:
        try:
            return os.lstat(self._path).st_ino == self.inode
        except FileNotFoundError:
            return False

    def _require_name(self) -> None:
        if not self._has_name():
            raise DownloadError(
                f"the unfinished file of {self._target.name!r} was replaced by another process"
            )

    def _forget_hashed(self) -> None:
        """Drop hashed data from the page cache, because this process does not read them again.

        Reusing cache pages is cheaper than taking unused memory, and a model of many gigabytes would
        evict what other processes read.
        """
        end = self._hashed - _CACHED_BYTES
        if end > 0:
            # Repeat for ranges dropped before: some may not have been on disk yet.
            self._let_go(max(0, end - 4 * _CACHED_BYTES), end)

    def _let_go(self, start: int, end: int) -> None:
        """Ask the kernel to start writing the range and to drop from the cache what is on disk."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only a hint
                os.posix_fadvise(self._file, start, end - start, os.POSIX_FADV_DONTNEED)

    def _was_cut(self) -> DownloadError:
        return DownloadError(f"the unfinished file of {self._target.name!r} was truncated by another process")

    def _cannot_write(self, exc: OSError) -> DownloadError:
        reason = "the disk is full" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else exc.strerror
        return DownloadError(f"cannot write {self._target.name!r}: {reason}")


def remove_unfinished(target: Path) -> None:
    """Remove the partial file that an abandoned download left beside its target. Blocks."""
    PartFile(target).close(keep=False)


def remove_stale(directory: Path, *, older_seconds: float) -> int:
    """Remove partial files of abandoned downloads; returns their number. Blocks."""
    oldest, removed = time.time() - older_seconds, 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not _PART_NAME.fullmatch(entry.name):
                continue
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    os.unlink(entry.path)
                    removed += 1
    return removed
