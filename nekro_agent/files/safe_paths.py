"""Opens, walks and removes paths below a directory without following links; the basis of ``safe_files``.

The kernel resolves a path with ``openat2`` where it exists and is permitted; otherwise the path is
opened component by component through descriptors, each with ``O_NOFOLLOW``.

Sandboxed code can nest directories deeper than any path can address and, where it runs as the service's
own user, remove the owner's permissions. Neither may hide files from a walk, end a walk with an error,
or prevent a tree from being removed. A walk therefore restores permissions, marks directories that are
too deep, and holds one descriptor per level; removing moves inner directories up instead of descending.

Source: openat2(2), ``RESOLVE_BENEATH``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Final

from nekro_agent.errors import InvalidValueError

__all__ = [
    "DIRECTORY",
    "MAX_DEPTH",
    "Node",
    "directory",
    "empty_directory",
    "has_openat2",
    "open_beneath",
    "refused",
    "remove_hidden",
    "split_path",
    "walk",
]

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


#: Directories with longer paths are not entered, because no path could address their content.
_LONGEST_PATH_BYTES: Final = 3700

_ENTER: Final = 0o700

_WALK: Final = 0o500

_PATH_ONLY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_MOST_NAMES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Node:
    """One name below a directory, of any type; ``parent_fd`` is open until the next node is yielded."""

    path: str
    info: os.stat_result
    parent_fd: int
    name: str
    #: Whether it is a directory that is not entered, because no path could address its content.
    is_hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class _Level:
    """A directory that is being walked."""

    fd: int
    #: Names, each with whether it was a directory.
    names: Iterator[tuple[str, bool]]
    parents: tuple[str, ...]


def walk(
    root: Path | int, *, max_entries: int, on_lost: Callable[[bool], None] | None = None
) -> Iterator[Node]:
    """Yield everything below ``root``, of any type; links are not followed.

    Entries replaced or removed meanwhile are left out. Stops after ``max_entries`` names, because
    sandboxed code can create any number of them.

    Args:
        on_lost: called for each name that disappeared before it could be read, with whether it was a
            directory, whose content is then left out too.
    """
    left = max_entries
    with _opened(root, os.R_OK | os.X_OK) as root_fd:
        levels = [_level(os.dup(root_fd), ())]
        try:
            while levels and left > 0:
                level = levels[-1]
                name, was_directory = next(level.names, ("", False))
                if not name:
                    os.close(levels.pop().fd)
                    continue
                left -= 1
                try:
                    info = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
                except (FileNotFoundError, PermissionError):  # removed or made inaccessible meanwhile
                    if on_lost is not None:
                        on_lost(was_directory)
                    continue
                path = (*level.parents, name)
                is_directory = stat.S_ISDIR(info.st_mode)
                is_hidden = is_directory and _is_too_deep(path)
                if is_directory and not is_hidden:
                    inner = _enter(level.fd, name)
                    levels += [] if inner is None else [_level(inner, path)]
                    if inner is None and on_lost is not None:
                        on_lost(True)
                yield Node(path="/".join(path), info=info, parent_fd=level.fd, name=name, is_hidden=is_hidden)
        finally:
            for level in levels:
                os.close(level.fd)


def empty_directory(root: Path | int) -> int:
    """Remove everything below ``root`` but not ``root``; returns the number of names removed.

    Raises:
        OSError: something cannot be removed; the rest is still removed.
    """
    with _opened(root, os.R_OK | os.W_OK | os.X_OK) as root_fd:
        return _remove_all(root_fd, os.listdir(root_fd))


def remove_hidden(root: Path | int) -> int:
    """Remove the directories below ``root`` that a walk does not enter; returns the number of names removed.

    Raises:
        OSError: something cannot be removed; the rest is still removed.
    """
    doomed: list[str] = []
    with _opened(root, os.R_OK | os.W_OK | os.X_OK) as root_fd:
        for node in walk(root_fd, max_entries=_MOST_NAMES):
            if node.is_hidden:
                doomed.append(_lift(node.parent_fd, node.name, root_fd))
        return _remove_all(root_fd, doomed)


@contextlib.contextmanager
def _opened(root: Path | int, needed: int) -> Iterator[int]:
    """Yield a descriptor of ``root``, restoring its permissions if sandboxed code removed them."""
    if not isinstance(root, int) and not os.access(root, needed):
        with contextlib.suppress(OSError):
            os.chmod(root, _ENTER)
    with directory(root) as fd:
        yield fd


def _level(fd: int, parents: tuple[str, ...]) -> _Level:
    try:
        info = os.fstat(fd)
        if info.st_uid == os.geteuid() and info.st_mode & _WALK != _WALK:
            os.fchmod(fd, _ENTER)
        return _Level(fd=fd, names=iter(_names_in(fd)), parents=parents)
    except OSError:
        os.close(fd)
        raise


def _names_in(fd: int) -> list[tuple[str, bool]]:
    with os.scandir(fd) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _is_too_deep(path: tuple[str, ...]) -> bool:
    return len(path) >= MAX_DEPTH or len(os.fsencode("/".join(path))) > _LONGEST_PATH_BYTES


def _enter(parent_fd: int, name: str) -> int | None:
    """Open a directory; None if it was renamed or replaced, or belongs to another user who denies access."""
    for _ in range(2):
        try:
            return open_beneath(parent_fd, (name,), DIRECTORY)
        except PermissionError:
            _unlock(parent_fd, name)
        except (OSError, InvalidValueError):
            return None
    return None


def _unlock(parent_fd: int, name: str) -> None:
    """Restore this user's permissions on its own directory, without following links; errors are ignored."""
    with contextlib.suppress(OSError):
        fd = os.open(name, _PATH_ONLY, dir_fd=parent_fd)
        try:
            if os.fstat(fd).st_mode & _ENTER != _ENTER:
                # fchmod does not accept such a descriptor.
                os.chmod(f"/proc/self/fd/{fd}", _ENTER)
        finally:
            os.close(fd)


def _lift(parent_fd: int, name: str, root_fd: int) -> str:
    """Move a directory up to ``root_fd`` under a new name, which is returned."""
    _unlock(parent_fd, name)  # moving a directory writes to it
    lifted = f".{secrets.token_hex(8)}.gone"
    os.rename(name, lifted, src_dir_fd=parent_fd, dst_dir_fd=root_fd)
    return lifted


def _remove_all(root_fd: int, names: Iterable[str]) -> int:
    """Remove names below ``root_fd``, including whole trees."""
    pending = list(names)
    removed = 0
    failure: OSError | None = None
    while pending:
        try:
            removed += _remove(root_fd, pending.pop(), pending)
        except FileNotFoundError:
            continue
        except OSError as exc:
            failure = exc
    if failure is not None:
        raise failure
    return removed


def _remove(root_fd: int, name: str, pending: list[str]) -> int:
    """Remove one name; directories in it are moved up and added to ``pending``."""
    try:
        os.unlink(name, dir_fd=root_fd)
        return 1
    except (IsADirectoryError, PermissionError):
        pass
    _unlock(root_fd, name)
    fd = os.open(name, DIRECTORY, dir_fd=root_fd)
    removed = 1
    try:
        for child in os.listdir(fd):
            with contextlib.suppress(OSError):  # a name that remains makes removing the directory fail
                removed += _remove_or_lift(fd, child, root_fd, pending)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=root_fd)
    return removed


def _remove_or_lift(fd: int, name: str, root_fd: int, pending: list[str]) -> int:
    try:
        os.unlink(name, dir_fd=fd)
        return 1
    except (IsADirectoryError, PermissionError):
        pending.append(_lift(fd, name, root_fd))
        return 0
