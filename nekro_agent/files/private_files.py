"""Creates directories and files of the data directory, private to this user from their creation on.

Every directory is created with mode 0700 and every file with 0600, whatever the umask of the process
is. There are two exceptions for sandboxed code that runs as a separate host user:

- a directory that such code must traverse is as traversable as its parent (``passable=True``);
- a file in a directory that others can read is as readable (:func:`modes_within`).

The parent decides both, so writers need not know which sandbox driver is in use.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, NamedTuple

__all__ = [
    "Modes",
    "make_directory",
    "modes_within",
    "open_private",
    "open_unnamed",
    "restrict",
    "write_private",
]

_OTHERS: Final = 0o077
_PASS: Final = 0o011
_READ_BY_ALL: Final = 0o004


class Modes(NamedTuple):
    """Permission bits of new entries of a directory."""

    file: int
    directory: int


def modes_within(parent: os.stat_result) -> Modes:
    """Return the modes of new entries: readable by all if ``parent`` is, else private."""
    is_open = parent.st_mode & _READ_BY_ALL
    return Modes(0o644, 0o755) if is_open else Modes(0o600, 0o700)


def make_directory(path: Path, *, passable: bool = False) -> Path:
    """Create a private directory and its missing parents; one that exists keeps its mode.

    Args:
        passable: let other users traverse the new directories, without listing them, if they can
            traverse the parent directory.

    Raises:
        OSError: it cannot be created, or the name exists and is not a directory.
    """
    missing: list[Path] = []
    for directory in (path, *path.parents):
        if directory.exists():
            break
        missing.append(directory)
    for directory in reversed(missing):
        mode = 0o700
        if passable:
            mode |= directory.parent.stat().st_mode & _PASS
        try:
            directory.mkdir(mode)
        except FileExistsError:  # another process created it meanwhile
            continue
        directory.chmod(mode)  # the umask may have removed bits that are needed
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    return path


def open_private(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file for writing, like ``open``; it is private before anything is written to it.

    A link at ``path`` is not followed.
    """
    return open(path, mode, opener=_open_descriptor, **options)


def open_unnamed(directory: Path) -> BinaryIO:
    """Open a private file without a name in a directory, which may get a name later (``FileCache.adopt``)."""
    try:
        # `tempfile` adds O_EXCL, and the kernel gives such a file no name.
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        return tempfile.TemporaryFile(dir=directory)  # not every file system has such files
    return open(fd, "w+b")


def write_private(path: Path, content: str | bytes) -> None:
    """Write a private file atomically: readers see the old content or the new one.

    The directory is created if it is missing.
    """
    make_directory(path.parent)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with open_private(temporary, "xb") as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def restrict(path: Path, mode: int) -> bool:
    """Restrict a directory or file of this user to ``mode`` for others; returns whether it changed.

    Links, files of other users and directories with the sticky bit (``/tmp``), which are shared
    deliberately, are not changed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        is_shared = info.st_uid != os.geteuid() or info.st_mode & stat.S_ISVTX
        if is_shared or info.st_mode & _OTHERS == mode & _OTHERS:
            return False
        os.fchmod(fd, stat.S_IMODE(info.st_mode) & ~_OTHERS | mode & _OTHERS)
        return True
    finally:
        os.close(fd)


def _open_descriptor(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    mode = os.fstat(fd).st_mode
    if mode & _OTHERS and os.fstat(fd).st_uid == os.geteuid():
        os.fchmod(fd, stat.S_IMODE(mode) & ~_OTHERS)
    return fd
