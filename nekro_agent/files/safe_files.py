"""Host-side access to directories that sandboxed code can write.

Between checking a path and opening it, sandboxed code can replace a directory with a link to
anywhere; ``resolve()`` and ``is_relative_to()`` can lose that race thousands of times a second.
Here every path is relative to a directory that the host created, and the kernel resolves it without
following any link: with ``openat2`` where it exists, else component by component. The opened file
must be an ordinary file with a single name; reading stops at a limit given by the caller, because
the size of a file can change while it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO, Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.private_files import modes_within
from nekro_agent.files.safe_paths import (
    DIRECTORY,
    Node,
    directory,
    empty_directory,
    open_beneath,
    refused,
    remove_hidden,
    split_path,
    walk,
)

__all__ = [
    "Entry",
    "Node",
    "copy_out",
    "create_file",
    "empty_directory",
    "give_tree",
    "info_of",
    "list_files",
    "measure",
    "open_file",
    "parent_of",
    "read_file",
    "remove_empty",
    "remove_file",
    "remove_hidden",
    "replace_file",
    "sha256_of",
    "split_path",
    "take_ownership",
    "walk",
    "write_sparse",
]

_CHUNK_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK_BYTES)
#: Without O_NONBLOCK, opening a FIFO would block until a writer opens it.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One ordinary file below a directory."""

    #: Relative to the directory, ``/`` between components. Bytes that are not UTF-8 are
    #: surrogate-escaped: pass the path back unchanged, display it with ``ascii()``.
    path: str
    size_bytes: int
    #: Last change of the content, in nanoseconds since the epoch.
    modified_ns: int


@contextlib.contextmanager
def open_file(root: Path | int, path: str | PurePath) -> Iterator[BinaryIO]:
    """Open an ordinary file below ``root`` for reading.

    Args:
        root: a directory, or a descriptor of one; sandboxed code must not be able to rename
            its path.

    Raises:
        InvalidValueError: the path leaves ``root``, follows a link, or is not an ordinary file
            with exactly one name.
        FileNotFoundError: there is no such file.
    """
    components = split_path(path)
    with directory(root) as root_fd:
        fd = open_beneath(root_fd, components, _READ)
    try:
        _check_ordinary(os.fstat(fd), "/".join(components))
    except InvalidValueError:
        os.close(fd)
        raise
    with os.fdopen(fd, "rb", buffering=0) as file:
        yield file


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of the rest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def info_of(root: Path | int, path: str | PurePath) -> os.stat_result:
    """Return the status of a path below ``root`` of any type but a link, without opening it.

    Raises:
        InvalidValueError: the path leaves ``root``, or is or follows a link.
        FileNotFoundError: it does not exist.
    """
    components = split_path(path)
    with directory(root) as root_fd:
        fd = open_beneath(root_fd, components, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    if stat.S_ISLNK(info.st_mode):  # possible after walking; openat2 refuses links itself
        raise refused("/".join(components), "it leads over a link")
    return info


@contextlib.contextmanager
def parent_of(root: Path | int, path: str | PurePath) -> Iterator[tuple[int, str]]:
    """Open the directory of a path below ``root``, creating directories; yields its descriptor and the name.

    Raises:
        InvalidValueError: the path leaves ``root`` or one of its directories is a link.
    """
    *parents, name = split_path(path)
    with directory(root) as root_fd:
        parent_fd = _make_directories(root_fd, parents, os.fstat(root_fd))
    try:
        yield parent_fd, name
    finally:
        os.close(parent_fd)


def read_file(root: Path | int, path: str | PurePath, *, max_bytes: int) -> bytes:
    """Return the content of an ordinary file below ``root``.

    Raises:
        InvalidValueError: as ``open_file``, or the file has more than ``max_bytes``.
        FileNotFoundError: there is no such file.
    """
    with open_file(root, path) as file:
        return b"".join(_capped(file, max_bytes, os.fspath(path)))


def copy_out(root: Path | int, path: str | PurePath, *, destination: Path, max_bytes: int) -> int:
    """Copy an ordinary file below ``root`` to a new private file; returns its size in bytes.

    Plugins get such a copy, or bytes, because a path into the directory itself could be replaced.

    Raises:
        InvalidValueError: as ``read_file``; ``destination`` is then removed.
        FileExistsError: ``destination`` exists.
    """
    with open_file(root, path) as source:
        target_fd = os.open(destination, _CREATE, 0o600)
        try:
            with os.fdopen(target_fd, "wb") as target:
                return write_sparse(target, _capped(source, max_bytes, os.fspath(path)))
        except BaseException:
            destination.unlink(missing_ok=True)
            raise


def create_file(root: Path | int, path: str | PurePath, data: bytes | BinaryIO) -> str:
    """Write a new file below ``root``, creating directories; returns its normalised path.

    An existing name, even a link, is refused, so the file is never written elsewhere. The file
    gets the owner of ``root``, so that a sandbox with a separate user can use it.

    Raises:
        FileExistsError: the name exists.
        InvalidValueError: the path leaves ``root`` or one of its directories is a link.
    """
    *parents, name = split_path(path)
    with directory(root) as root_fd:
        owner = os.fstat(root_fd)
        parent_fd = _make_directories(root_fd, parents, owner)
        mode = modes_within(os.fstat(parent_fd)).file
        try:
            fd = os.open(name, _CREATE, mode, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        _adopt(fd, owner)
        if isinstance(data, bytes):
            file.write(data)
        else:
            write_sparse(file, iter(lambda: data.read(_CHUNK_BYTES), b""))
    return "/".join((*parents, name))


def replace_file(root: Path | int, path: str | PurePath, data: bytes | BinaryIO) -> None:
    """Write a file below ``root``, creating directories and replacing an existing file of its name.

    The file appears complete or not at all. A link at that name is replaced, never written through.

    Raises:
        InvalidValueError: the path leaves ``root`` or one of its directories is a link.
        IsADirectoryError: ``path`` is a directory.
    """
    temporary = f".{secrets.token_hex(8)}.part"
    with parent_of(root, path) as (parent_fd, name):
        try:
            create_file(parent_fd, temporary, data)
            os.rename(temporary, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=parent_fd)
            raise


def list_files(root: Path | int, *, max_entries: int) -> Iterator[Entry]:
    """Yield the ordinary files below ``root``, directory by directory; links are not followed.

    Stops after ``max_entries`` names of any type.
    """
    for node in walk(root, max_entries=max_entries):
        if stat.S_ISREG(node.info.st_mode):
            yield Entry(path=node.path, size_bytes=node.info.st_size, modified_ns=node.info.st_mtime_ns)


def measure(root: Path | int, *, max_entries: int) -> tuple[int, int]:
    """Return (disk bytes, names) below ``root``; counting stops at ``max_entries`` names."""
    used_bytes = names = 0
    for node in walk(root, max_entries=max_entries):
        used_bytes += node.info.st_blocks * 512
        names += 1
    return used_bytes, names


def remove_file(root: Path | int, path: str | PurePath) -> None:
    """Remove one name below ``root`` that is not a directory; for a link, the link itself.

    Raises:
        InvalidValueError: the path leaves ``root`` or one of its directories is a link.
        FileNotFoundError: there is no such name.
    """
    _remove(root, path, lambda name, parent_fd: os.unlink(name, dir_fd=parent_fd))


def remove_empty(root: Path | int, path: str | PurePath) -> bool:
    """Remove an empty directory below ``root``; False if it is not empty or not a directory."""
    try:
        _remove(root, path, lambda name, parent_fd: os.rmdir(name, dir_fd=parent_fd))
    except (OSError, InvalidValueError):
        return False
    return True


def take_ownership(
    root: Path | int, *, uid: int, gid: int, max_entries: int, owners: Collection[int] | None = None
) -> None:
    """Change the owner of ``root``, and of everything below it that ``owners`` own, to another user.

    For links the link itself is changed, never its target.

    Args:
        owners: user ids; None means this process's own.
    """
    given = {os.geteuid()} if owners is None else set(owners)
    with directory(root) as root_fd:
        if os.fstat(root_fd).st_uid != uid:
            os.fchown(root_fd, uid, gid)
        for node in walk(root_fd, max_entries=max_entries):
            if node.info.st_uid in given:
                _give(node, uid, gid)


def give_tree(root: Path, *, uid: int, gid: int, mode: int) -> None:
    """Set the mode of ``root``; if its owner is another user, give it and everything below it to ``uid``.

    ``root`` changes its owner last, so a call after one that was interrupted does the rest. For links the
    link itself is changed, never its target. What is in directories that a walk does not enter is left.
    """
    with directory(root) as root_fd:
        os.fchmod(root_fd, mode)
        if os.fstat(root_fd).st_uid == uid:
            return
        for node in walk(root_fd, max_entries=sys.maxsize):
            _give(node, uid, gid)
        os.fchown(root_fd, uid, gid)


def _give(node: Node, uid: int, gid: int) -> None:
    if node.info.st_uid != uid:
        with contextlib.suppress(FileNotFoundError):
            os.chown(node.name, uid, gid, dir_fd=node.parent_fd, follow_symlinks=False)


def _remove(root: Path | int, path: str | PurePath, remove: Callable[[str, int], None]) -> None:
    *parents, name = split_path(path)
    with directory(root) as root_fd:
        parent_fd = open_beneath(root_fd, tuple(parents), DIRECTORY) if parents else os.dup(root_fd)
    try:
        try:
            remove(name, parent_fd)
        except PermissionError:  # the directory's owner, who may be this user, has removed its permissions
            os.fchmod(parent_fd, 0o700)
            remove(name, parent_fd)
    finally:
        os.close(parent_fd)


def _check_ordinary(info: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise refused(path, "it is not an ordinary file")
    if info.st_nlink != 1:
        # The file's other name may be one that the code must not read or change.
        raise refused(path, "it has more than one name (hard link) or none")


def _capped(file: BinaryIO, max_bytes: int, path: str) -> Iterator[bytes]:
    left = max_bytes
    while chunk := file.read(min(_CHUNK_BYTES, left + 1)):
        left -= len(chunk)
        if left < 0:
            raise refused(path, f"it has more than {max_bytes} bytes")
        yield chunk


def write_sparse(file: BinaryIO, chunks: Iterable[bytes]) -> int:
    """Write chunks and return their size; zeros become holes, so that a sparse file stays sparse."""
    size = 0
    for chunk in chunks:
        if chunk == _ZEROS[: len(chunk)]:
            file.seek(len(chunk), os.SEEK_CUR)
        else:
            file.write(chunk)
        size += len(chunk)
    file.truncate(size)
    return size


def _make_directories(root_fd: int, parents: list[str], owner: os.stat_result) -> int:
    fd = os.dup(root_fd)
    mode = modes_within(owner).directory
    try:
        for name in parents:
            is_new = _make_one(fd, name, mode)
            inner = open_beneath(fd, (name,), DIRECTORY)
            os.close(fd)
            fd = inner
            if is_new:
                os.fchmod(fd, mode)
            _adopt(fd, owner)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _make_one(parent_fd: int, name: str, mode: int) -> bool:
    """Create a directory; False if the name exists."""
    try:
        os.mkdir(name, mode, dir_fd=parent_fd)
    except FileExistsError:
        return False
    return True


def _adopt(fd: int, owner: os.stat_result) -> None:
    if os.geteuid() == 0 and os.fstat(fd).st_uid == 0:
        os.fchown(fd, owner.st_uid, owner.st_gid)
