"""``/app/shared`` of chats: empty it when they are idle, and make ``shared/x`` and ``uploads/x`` valid names.

A sandbox holds a shared lock on its directory from its start to its end, and emptying needs an exclusive
lock: the kernel's file locks work between processes of a host and are released when a process ends. The
directory's change time is the time of its last use.

The guest makes the links of the names (``nekro.sandbox.guest.working_directory``) while programs run that
mention the areas. Programs of several processes of a host may use the same shared files at the same time, so
the last one to end removes the links. A lock of an open file shows whether there are others: it needs no file
of its own, and does not meet the locks of other kinds that hold the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from loguru import logger

from nekro.base.tasks import end_tasks
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import NekroError
from nekro_agent.files import safe_files

__all__ = [
    "IDLE_SWEEPS",
    "LINK_NAMES",
    "Hold",
    "ProgramLinks",
    "SharedCleaner",
    "empty_idle",
    "mentions_areas",
]

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ALL: Final = 0o700
#: How many sweeps for idle directories fit into the idle time.
IDLE_SWEEPS: Final = 10


class Hold:
    """Prevents a shared directory from being emptied until it is released."""

    def __init__(self, directory: Path) -> None:
        """Acquire the lock; waits for a sweep that is emptying the directory."""
        self._fd = os.open(directory, _DIRECTORY)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Release the lock; the idle time starts now."""
        with contextlib.suppress(OSError):
            os.utime(self._fd)
        os.close(self._fd)


def empty_idle(parent: Path, *, idle_seconds: float, kept: Collection[str] = ()) -> int:
    """Empty every directory below ``parent`` that was idle for ``idle_seconds``; returns how many.

    Args:
        kept: names of those that are in use without a sandbox.

    Raises:
        OSError: one of them cannot be emptied; the others are.
    """
    count, failure = 0, None
    for path in _directories(parent):
        if path.name in kept:
            continue
        try:
            count += _empty_if_idle(path, time.time() - idle_seconds)
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError as exc:
            failure = exc
    if failure is not None:
        raise failure
    return count


class SharedCleaner:
    """Sweeps the shared directories of a service periodically."""

    def __init__(
        self,
        *,
        idle_seconds: float,
        drop_idle: Callable[..., int] | None = None,
        kept: Callable[[], Awaitable[Collection[str]]] | None = None,
    ) -> None:
        """
        Args:
            idle_seconds: 0 disables the sweeps.
            drop_idle: ``area_images.drop_idle`` where areas are images; called before directories are
                emptied.
            kept: returns the names of directories that are in use without a sandbox; None: there are none.
        """
        self._kept = kept
        self._idle_seconds = idle_seconds
        self._drop_idle = drop_idle
        self._parents: set[Path] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, parent: Path) -> None:
        """Include the directories below ``parent`` in later sweeps."""
        self._parents.add(parent)

    def start(self) -> None:
        """Start to sweep, unless sweeps are disabled."""
        if self._idle_seconds > 0 and self._task is None:
            self._task = asyncio.create_task(self._sweep_for_ever(), name="sandbox-shared-cleaner")

    async def close(self) -> None:
        """Stop sweeping."""
        await end_tasks(self._task)
        self._task = None

    async def _sweep_for_ever(self) -> None:
        pause = max(self._idle_seconds / IDLE_SWEEPS, FRESH_SECONDS)
        while True:
            await asyncio.sleep(pause)
            await self.sweep()

    async def sweep(self) -> None:
        """Empty what is idle; what fails is tried again by the next sweep, and does not affect runs."""
        for parent in list(self._parents):
            try:
                kept = () if self._kept is None else await self._kept()
                count = await asyncio.to_thread(self._sweep, parent, kept)
            except (OSError, NekroError) as exc:
                logger.bind(directory=str(parent), error=str(exc)).warning("sandbox_sweep_failed")
                continue
            if count:
                logger.bind(count=count).info("sandbox_shared_emptied")

    def _sweep(self, parent: Path, kept: Collection[str]) -> int:
        count = 0
        if self._drop_idle is not None:
            count = self._drop_idle(parent, idle_seconds=self._idle_seconds, kept=kept)
        return count + empty_idle(parent, idle_seconds=self._idle_seconds, kept=kept)


def _directories(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _empty_if_idle(path: Path, before: float) -> bool:
    info = path.lstat()
    if info.st_ctime > before:
        return False
    since = before
    if info.st_uid == os.geteuid() and info.st_mode & _ALL != _ALL:  # by sandboxed code of this user
        path.chmod(_ALL)
        since = path.lstat().st_ctime
    fd = os.open(path, _DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ctime > since or _changed_since(fd, before):
            return False
        return safe_files.empty_directory(fd) > 0
    except BlockingIOError:  # a sandbox, here or in another process
        return False
    finally:
        os.close(fd)


def _changed_since(fd: int, before: float) -> bool:
    """Whether anything below the directory changed after ``before``, as by a plugin."""
    return any(node.info.st_ctime > before for node in safe_files.walk(fd, max_entries=10_000))


#: As in the guest, whose modules the host does not import.
LINK_NAMES: Final = ("shared", "uploads")
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_LOCK: Final = struct.Struct("hhqqi4x")


def mentions_areas(texts: Iterable[str]) -> bool:
    """Whether a program with these texts, its code and its variables, may get links."""
    return any(name in text for text in texts for name in LINK_NAMES)


class ProgramLinks:
    """One program's use of the links in its shared files."""

    def __init__(self, directory: Path) -> None:
        """Keep the links until ``end``, also where the program of another process ends before."""
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # no locks on this file system: the first one to end removes them
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, 0, 0, 0, 0))

    def end(self) -> None:
        """Remove the links unless another program uses them; call it once."""
        try:
            if self._has_others():
                return
            targets = {name: target for name in LINK_NAMES if (target := self._remove(name)) is not None}
            if targets and self._has_others():  # it started meanwhile, and has seen them
                for name, target in targets.items():
                    with contextlib.suppress(OSError):
                        os.symlink(target, name, dir_fd=self._fd)
        finally:
            os.close(self._fd)

    def _has_others(self) -> bool:
        try:
            answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        except OSError:
            return False
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _remove(self, name: str) -> str | None:
        """Remove a link; returns what it led to, None if there is no link of this name."""
        try:
            target = os.readlink(name, dir_fd=self._fd)
            os.unlink(name, dir_fd=self._fd)
        except OSError:
            return None
        return target
