"""Walking and removing whole trees that sandboxed code made, whatever shape it gave them.

Code can nest directories deeper than any path reaches and, where it runs as the service's own
user, close them to their owner. Neither may hide anything from a walk, end one in an error, or
keep a tree from being removed. So a walk opens what is closed, marks what is too deep, and
holds one descriptor per level; removing moves inner directories up instead of descending.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.tools.safe_open import DIRECTORY, MAX_DEPTH, directory, open_beneath

__all__ = ["Node", "empty_directory", "remove_hidden", "walk"]

#: Directories whose own path is longer are not entered: of what lies inside, no path would reach it.
_LONGEST_PATH_BYTES: Final = 3700
_ENTER: Final = 0o700
_WALK: Final = 0o500
_PATH_ONLY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_NAMES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Node:
    """One name below a directory, whatever it is; ``parent_fd`` is open until the next one comes."""

    path: str
    info: os.stat_result
    parent_fd: int
    name: str
    #: A directory that is not entered, because no path would reach what lies in it.
    is_hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class _Level:
    """A directory that is being walked."""

    fd: int
    #: Each with whether it was a directory.
    names: Iterator[tuple[str, bool]]
    parents: tuple[str, ...]


def walk(
    root: Path | int, *, max_entries: int, on_lost: Callable[[bool], None] | None = None
) -> Iterator[Node]:
    """Yield everything below ``root``, of any kind; links are not followed.

    What is swapped or removed meanwhile is left out. Stops after ``max_entries`` names, since
    whoever writes there can make more of them than anybody wants to see.

    Args:
        on_lost: called for each name that was gone before it could be looked at, with whether it
            was a directory, whose content then is left out too.
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
                except (FileNotFoundError, PermissionError):  # removed, or closed, meanwhile
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
    """Remove everything below ``root`` but not ``root``; returns how many names went.

    Raises:
        OSError: something cannot be removed; the rest is removed nevertheless.
    """
    with _opened(root, os.R_OK | os.W_OK | os.X_OK) as root_fd:
        return _remove_all(root_fd, os.listdir(root_fd))


def remove_hidden(root: Path | int) -> int:
    """Remove the directories below ``root`` that a walk does not enter; returns how many names went.

    Raises:
        OSError: something cannot be removed; the rest is removed nevertheless.
    """
    doomed: list[str] = []
    with _opened(root, os.R_OK | os.W_OK | os.X_OK) as root_fd:
        for node in walk(root_fd, max_entries=_MOST_NAMES):
            if node.is_hidden:
                doomed.append(_lift(node.parent_fd, node.name, root_fd))
        return _remove_all(root_fd, doomed)


@contextlib.contextmanager
def _opened(root: Path | int, needed: int) -> Iterator[int]:
    """Yield a descriptor of ``root``, which its code may have closed to the service's user as well."""
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
    """Open a directory; None when it was renamed or swapped, or is another user's and closed."""
    for _ in range(2):
        try:
            return open_beneath(parent_fd, (name,), DIRECTORY)
        except PermissionError:
            _unlock(parent_fd, name)
        except (OSError, InvalidValueError):
            return None
    return None


def _unlock(parent_fd: int, name: str) -> None:
    """Open a directory of this user's to this user, without following a link; failing is no error."""
    with contextlib.suppress(OSError):
        fd = os.open(name, _PATH_ONLY, dir_fd=parent_fd)
        try:
            if os.fstat(fd).st_mode & _ENTER != _ENTER:
                # There is no fchmod for such a descriptor.
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
    """Remove names below ``root_fd``, whole trees among them."""
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
            with contextlib.suppress(OSError):  # what stays makes the directory's own removal fail
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
