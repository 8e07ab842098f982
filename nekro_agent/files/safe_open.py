"""Opens paths below a directory without following links; the basis of ``safe_files``.

The kernel resolves the path with ``openat2`` where it exists and is permitted; otherwise the path is
opened component by component through descriptors, each with ``O_NOFOLLOW``.

Source: openat2(2), ``RESOLVE_BENEATH``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath
from typing import Final

from nekro_agent.errors import InvalidValueError

__all__ = ["DIRECTORY", "directory", "has_openat2", "open_beneath", "refused", "split_path"]

#: Deeper paths are refused.
MAX_DEPTH: Final = 32
#: Flags for opening a directory.
DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_OPENAT2: Final = 437
#: RESOLVE_NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS and BENEATH.
_RESOLVE: Final = 0x01 | 0x02 | 0x04 | 0x08
_RACES: Final = 16


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def refused(path: str, reason: str) -> InvalidValueError:
    """Return the error for a path that is not opened."""
    return InvalidValueError(f"{path!a} is refused: {reason}")


def split_path(path: str | PurePath) -> tuple[str, ...]:
    """Return the components of a relative path.

    Raises:
        InvalidValueError: it is empty, absolute, too deep, or contains ``..`` or a NUL.
    """
    text = os.fspath(path)
    if "\0" in text:
        # Checked first, because C code would use the path up to the NUL only.
        raise refused(text, "it contains a NUL character")
    if text.startswith("/"):
        raise refused(text, "it is absolute")
    components = tuple(part for part in text.split("/") if part not in ("", "."))
    if not components:
        raise refused(text, "it names no file")
    if ".." in components:
        raise refused(text, "it leads upwards")
    if len(components) > MAX_DEPTH:
        raise refused(text, f"it is deeper than {MAX_DEPTH} directories")
    return components


@contextlib.contextmanager
def directory(root: Path | int) -> Iterator[int]:
    """Yield a descriptor of a directory; a descriptor passed in stays open."""
    if isinstance(root, int):
        yield root
        return
    fd = os.open(root, DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def open_beneath(root_fd: int, components: tuple[str, ...], flags: int) -> int:
    """Open a path of components from ``split_path``; the caller closes the descriptor.

    Raises:
        InvalidValueError: it leads through a link, out of the directory or through a non-directory.
        OSError: any other error, including ``FileNotFoundError``.
    """
    try:
        return (_by_openat2 if has_openat2() else _by_walk)(root_fd, components, flags)
    except OSError as exc:
        reasons = {
            errno.ELOOP: "it leads over a link",
            errno.EXDEV: "it leads out of its directory",
            errno.ENXIO: "it is not an ordinary file",
            errno.ENOTDIR: "it leads over something that is not a directory",
            errno.ENAMETOOLONG: "one of its names is too long",
        }
        if exc.errno in reasons:
            raise refused("/".join(components), reasons[exc.errno]) from exc
        raise


def _by_openat2(root_fd: int, components: tuple[str, ...], flags: int) -> int:
    how = _OpenHow(flags, 0, _RESOLVE)
    path = os.fsencode("/".join(components))
    libc = _libc()
    for _ in range(_RACES):
        fd: int = libc.syscall(_OPENAT2, root_fd, path, ctypes.byref(how), ctypes.sizeof(how))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number != errno.EAGAIN:  # EAGAIN: a concurrent rename, and the kernel requests a retry
            raise OSError(number, os.strerror(number), "/".join(components))
    raise OSError(errno.ELOOP, "renamed all the time", "/".join(components))


def _by_walk(root_fd: int, components: tuple[str, ...], flags: int) -> int:
    *parents, name = components
    fd = os.dup(root_fd)
    try:
        for parent in parents:
            inner = os.open(parent, DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
        return os.open(name, flags, dir_fd=fd)
    finally:
        os.close(fd)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@cache
def has_openat2() -> bool:
    """Whether the kernel has the call and it is permitted (a container's seccomp profile may deny it)."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return False
    how = _OpenHow(DIRECTORY, 0, _RESOLVE)
    fd: int = _libc().syscall(_OPENAT2, -100, b".", ctypes.byref(how), ctypes.sizeof(how))
    if fd >= 0:
        os.close(fd)
    return fd >= 0
