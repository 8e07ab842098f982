"""The areas that a host uses: each has one directory, for all processes of the host.

Two locks of the kernel keep uses apart; it releases them when a process dies. Who uses a directory holds one
as a reader. Whoever begins to use it and finds no other reader knows that what differs from the manifest was
left by a process that died. Each restore, pull and push holds the other lock for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from nekro.base.tasks import log_errors
from nekro_agent.errors import ConflictError, InvalidValueError, StorageUnavailableError
from nekro_agent.files.private_files import make_directory
from storage.engine import Database
from storage.files.cache import FileCache
from storage.files.contents import ContentStore
from storage.files.local_area import LocalArea, Pushed
from storage.files.local_state import LocalState
from storage.files.manifest import UNLIMITED, AreaLimits, LeaseWriter, Writer
from storage.files.stores.store import ObjectStore

__all__ = ["AreaInUse", "AreaPlace", "HostFiles"]

#: Between attempts to get a lock that another use holds.
_WAIT_SECONDS: Final = 0.01
#: Longest wait for such a lock: a large file over a slow network takes minutes, a stopped process for ever.
_HELD_SECONDS: Final = 570.0
#: States of directories that are kept in memory.
_STATES: Final = 64


@dataclass(frozen=True, kw_only=True)
class AreaPlace:
    """An area, and where this host has it."""

    #: ``uploads/<directory>``, ``shared/<container key>``, ``plugin/<plugin key>`` or ``configs``.
    name: str
    directory: Path
    limits: AreaLimits = UNLIMITED
    #: Whether a use begins by undoing the changes of processes that have ended.
    forgets: bool = True
    #: Whether a change of what another host has changed too is refused; otherwise the last one wins.
    refuses: bool = False
    #: Whether a use begins with the newest version as a whole; older changes of this host are set aside.
    takes_over: bool = False


class AreaInUse:
    """A use of an area; the directory has the newest version and what its users change."""

    def __init__(self, place: AreaPlace, area: LocalArea, lock: Path, root: Path) -> None:
        self.place = place
        self._area = area
        self._lock = lock
        self._root = root

    async def pull(self) -> None:
        """Bring what was committed since the last pull or push; what differs here stays.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: as ``LocalArea.pull``.
        """
        with _disk_errors(self.place):
            async with _locked(self._lock):
                await self._area.pull()

    async def push(self, *, writer: Writer | LeaseWriter | None = None, is_quiet: bool = False) -> Pushed:
        """Commit what has changed here.

        If that is refused because others have changed the same, the changes of this host are set aside, and
        the directory has the newest version afterwards.

        Raises:
            ConflictError: it was refused; it names a file, and where the changes of this host are.
            FencedError, FilesQuotaError, InvalidValueError, NotFoundError, StorageUnavailableError: as
                ``LocalArea.push``.
        """
        with _disk_errors(self.place):
            return await self._push(writer, is_quiet=is_quiet)

    async def _push(self, writer: Writer | LeaseWriter | None, *, is_quiet: bool) -> Pushed:
        async with _locked(self._lock):
            try:
                return await self._area.push(writer=writer, limits=self.place.limits, is_quiet=is_quiet)
            except (ConflictError, InvalidValueError) as exc:
                if not self.place.refuses:
                    # Perhaps others have added to a directory that is removed here, or made a file of one.
                    await self._area.pull()
                    return await self._area.push(writer=writer, limits=self.place.limits, is_quiet=is_quiet)
                aside = _new_aside(self._root, self.place)
                await self._area.set_aside(aside)
                raise ConflictError(
                    f"{self.place.name}: {exc}, so nothing of this call was stored; host "
                    f"{socket.gethostname()} keeps its version in {aside}"
                ) from exc


class HostFiles:
    """The areas of this host; use it in one event loop."""

    def __init__(self, database: Database, store: ObjectStore, *, root: Path, cache_bytes: int) -> None:
        """
        Args:
            root: directory for the cache, states and locks, which only this host uses.
            cache_bytes: bound of the cache.
        """
        self.store = store
        self._database = database
        self._root = root
        self._states: OrderedDict[str, LocalState] = OrderedDict()
        self.contents = ContentStore(database, store, FileCache(root / "cache", max_bytes=cache_bytes))

    @contextlib.asynccontextmanager
    async def use(self, place: AreaPlace) -> AsyncIterator[AreaInUse]:
        """Keep an area's directory in use for a block; it has the newest version when the block begins.

        Nothing is pushed at the end.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: as ``LocalArea.restore``.
            StorageUnavailableError: another process of this host, perhaps a stopped one, keeps the area.
        """
        with _disk_errors(place):
            await asyncio.to_thread(make_directory, self._root / "areas")
            file = self._file_of(place)
            area = self._area(place, file)
            changing, using = file.with_suffix(".changing"), _opened(file.with_suffix(".using"))
        try:
            with _disk_errors(place):
                async with _locked(changing):
                    # Readers come only while this lock is held, so none can come in between.
                    is_alone = _try_lock(using, fcntl.LOCK_EX)
                    if place.takes_over:
                        await area.take_over(_new_aside(self._root, place))
                    elif is_alone and place.forgets:
                        await area.restore()
                    else:
                        await area.pull()
                    fcntl.flock(using, fcntl.LOCK_SH)
            yield AreaInUse(place, area, changing, self._root)
        finally:
            os.utime(using)  # for `empty_unused`
            os.close(using)

    async def empty_unused(self, kind: str, parent: Path, *, unused: timedelta) -> int:
        """Remove what this host has of areas that no process of it has used for a time; returns of how many.

        A directory with changes that were not committed stays as it is.

        Args:
            kind: of the areas: ``uploads`` or ``shared``.
            parent: has the directories of all areas of this kind.
        """
        count = 0
        for name in await asyncio.to_thread(_names_in, parent):
            place = AreaPlace(name=f"{kind}/{name}", directory=parent / name)
            file = self._file_of(place)
            used_at = await asyncio.to_thread(_used_at, file)
            if used_at is not None and used_at < time.time() - unused.total_seconds():
                with log_errors("unused_area_not_emptied", area=place.name):
                    count += await self._empty(place, file)
        return count

    async def _empty(self, place: AreaPlace, file: Path) -> bool:
        changing, using = _opened(file.with_suffix(".changing")), _opened(file.with_suffix(".using"))
        try:
            # A use begins with the first lock, and lasts for as long as the second.
            if not (_try_lock(changing, fcntl.LOCK_EX) and _try_lock(using, fcntl.LOCK_EX)):
                return False
            return await self._area(place, file).empty()
        finally:
            os.close(using)
            os.close(changing)

    async def note_use(self, place: AreaPlace, *, seconds: float) -> None:
        """Keep an area from being idle, unless that was noted within a time.

        Raises:
            StorageUnavailableError: the database did not answer.
        """
        async with self._database.read() as tx:
            is_unused = await tx.files.is_unused(place.name, seconds=seconds)
        if is_unused:
            async with self._database.begin() as tx:
                await tx.files.touch(place.name)

    def _file_of(self, place: AreaPlace) -> Path:
        """Return the path of the state and the locks of an area, without their suffixes."""
        return self._root / "areas" / hashlib.sha256(os.fsencode(place.name)).hexdigest()

    def _area(self, place: AreaPlace, file: Path) -> LocalArea:
        return LocalArea(
            self._database,
            self.contents,
            name=place.name,
            directory=place.directory,
            state=self._state(file.with_suffix(".json")),
            refuses=place.refuses,
        )

    def _state(self, file: Path) -> LocalState:
        state = self._states.pop(file.name, None) or LocalState(file)
        self._states[file.name] = state
        if len(self._states) > _STATES:
            self._states.popitem(last=False)
        return state


def _names_in(parent: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(parent) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []


def _used_at(file: Path) -> float | None:
    """Return when the directory of an area was last used; None if it has nothing of the area."""
    try:
        file.with_suffix(".json").stat()
        return file.with_suffix(".using").stat().st_mtime
    except FileNotFoundError:
        return None


def _new_aside(root: Path, place: AreaPlace) -> Path:
    return root / "conflicts" / f"{place.directory.name}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _disk_errors(place: AreaPlace) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageUnavailableError(
            f"{place.name} cannot be used in {place.directory}: {exc}; free space on the disks of the data "
            "directory, and check its permissions"
        ) from exc


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Hold a lock for a block; waiting for it takes no thread, which its holder may need.

    Raises:
        StorageUnavailableError: another process of this host has not released it in time.
    """
    fd = _opened(path)
    latest = time.monotonic() + _HELD_SECONDS
    try:
        while not _try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > latest:
                raise StorageUnavailableError(
                    f"another process of this host has used {path} for {_HELD_SECONDS:g} s: "
                    "`fuser` names it; continue it if it is stopped, or end it"
                )
            await asyncio.sleep(_WAIT_SECONDS)
        yield
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
