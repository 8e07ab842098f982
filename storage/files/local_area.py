"""A directory of this host that shows an area: made from the manifest, and scanned for changes afterwards.

The directory stays between uses, so only what differs is copied. For each file that was copied, its inode,
size and times are kept (``storage.files.local_state``); a write in place, a rename over it and a modification
time that was set back change one of them. What a killed run left differs too, and ``restore`` replaces it by
what the manifest has. ``pull`` keeps what programs that still run have changed: it becomes part of the next
version.

Programs in sandboxes may change the directory at any time, so it is only used through descriptors that follow
no links.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from loguru import logger

from nekro_agent.errors import InvalidValueError, StorageError, StorageUnavailableError
from nekro_agent.files import safe_files
from nekro_agent.files.private_files import make_directory
from nekro_agent.files.safe_paths import remove_hidden, walk
from nekro_agent.tools.task_groups import in_thread, run_together
from storage.engine import Database
from storage.files.cache import CachedContent
from storage.files.contents import ContentStore
from storage.files.local_state import NO_STAT, FileStat, Known, LocalState, stat_of
from storage.files.manifest import UNLIMITED, Area, AreaLimits, Entry, LeaseWriter, Writer, require_room
from storage.files.paths import checked_path
from storage.files.scan import MOST_NAMES, Scan, scan_directory, settled
from storage.transaction import Transaction

__all__ = ["LocalArea", "Pushed"]

#: Files that are copied at a time.
_COPIES: Final = 8
#: Files whose contents are stored with one announcement.
_BATCH: Final = 500
_OWNER_EXECUTES: Final = 0o111


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What ``LocalArea.push`` has done."""

    #: At the version that it made; None: nothing had changed.
    area: Area | None
    #: Reasons by path, escaped: links, sockets, and names that an area cannot have. They remain here only.
    left_out: dict[str, str] = field(default_factory=dict)
    #: Whether nothing was committed because files changed meanwhile (``LocalArea.push`` with ``is_quiet``).
    is_busy: bool = False


class LocalArea:
    """One area in one directory. Use ``storage.files.host_files``, which keeps several uses apart."""

    def __init__(
        self,
        database: Database,
        contents: ContentStore,
        *,
        name: str,
        directory: Path,
        state: LocalState,
        refuses: bool = False,
    ) -> None:
        """
        Args:
            name: of the area.
            directory: may not exist yet; sandboxed code must not be able to rename it.
            state: of this directory.
            refuses: do not commit a change of what others have changed too, and keep files that were here
                before the area was first brought. Otherwise the last change wins, and such files go.
        """
        self._database = database
        self._contents = contents
        self._name = name
        self._directory = directory
        self._state = state
        self._refuses = refuses

    async def restore(self) -> Area | None:
        """Make the directory equal to the newest version; None if the area has none.

        The directory is empty then. Files from the time before the area become its first version.

        Raises:
            DamagedFileError: a content is missing or altered; it names the file.
            InvalidValueError: the manifest has a path that is not acceptable; nothing is written.
            StorageUnavailableError: the store or the database did not answer.
        """
        async with self._database.read() as tx:
            area = await tx.files.find(self._name)
            entries = [] if area is None else await tx.files.entries(area)
        wanted = {checked_path(entry.path): entry for entry in entries}
        await asyncio.to_thread(self._state.load)
        if area is None and self._state.is_new:
            return await self._adopt()
        known = await in_thread(self._prepare, wanted)
        self._state.replace(known, version=None)  # not complete yet
        await self._copy([entry for path, entry in wanted.items() if path not in known])
        await self._settle(0 if area is None else area.version)
        return area

    async def pull(self) -> Area | None:
        """Bring what others have committed since; files that differ from the last version stay as they are.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: as ``restore``.
        """
        await asyncio.to_thread(self._state.load)
        if self._state.version is None:
            if not self._refuses:
                return await self.restore()
            await self._begin()
        async with self._database.read() as tx:
            area = await tx.files.find(self._name)
            if area is None or area.version == self._state.version:
                return area
            present, gone = await self._changes(tx, area)
        present = [entry for entry in present if self._state.differs(entry)]
        for entry in present:
            checked_path(entry.path)
        version, self._state.version = self._state.version, None
        try:
            await self._copy(await in_thread(self._give_way, present, gone))
        except BaseException:
            self._state.version = version  # what was copied is known; the rest differs, and is copied later
            raise
        await self._settle(area.version)
        return area

    async def take_over(self, aside: Path) -> None:
        """Make the directory equal to the newest version, unless it is of that version and changed since.

        Args:
            aside: directory for changes of this host that are undone; see ``set_aside``.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: as ``restore``.
        """
        await asyncio.to_thread(self._state.load)
        async with self._database.read() as tx:
            area = await tx.files.find(self._name)
        if area is None and self._state.version is None:
            await self._begin()
        elif self._state.version != (0 if area is None else area.version):
            await self.set_aside(aside)

    async def set_aside(self, aside: Path) -> list[str]:
        """Copy what was changed here to another directory, and restore; returns the paths.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: as ``restore``; a disk that is full
                is one of the last.
        """
        await asyncio.to_thread(make_directory, self._directory)
        scan = await asyncio.to_thread(scan_directory, self._directory, self._state.known)
        paths = [path for path, info in scan.changed if stat.S_ISREG(info.st_mode)]
        try:
            for path in paths:
                await in_thread(_copy_aside, self._directory, path, aside)
        except OSError as exc:
            raise StorageUnavailableError(f"changes of {self._name} cannot be set aside: {exc}") from exc
        await self.restore()
        return paths

    async def empty(self) -> bool:
        """Remove all from the directory if all of it was committed; the next use brings it again."""
        await asyncio.to_thread(self._state.load)
        if self._state.version is None:
            return False
        scan = await asyncio.to_thread(scan_directory, self._directory, self._state.known)
        if scan.changed or scan.removed:
            return False
        # In this order: a directory without a state belongs to no version.
        await asyncio.to_thread(self._state.remove)
        await asyncio.to_thread(safe_files.empty_directory, self._directory)
        return True

    async def push(
        self,
        *,
        writer: Writer | LeaseWriter | None = None,
        limits: AreaLimits = UNLIMITED,
        is_quiet: bool = False,
    ) -> Pushed:
        """Commit how the directory differs from the version that it was made from.

        What programs write meanwhile may or may not be in the version.

        Args:
            is_quiet: commit nothing if a program writes meanwhile: several files fit together then.

        Raises:
            ConflictError: others have changed the same, and this area refuses that.
            FencedError, FilesQuotaError, InvalidValueError, NotFoundError: as ``ManifestRepository.commit``.
            StorageUnavailableError: the store, the database or the disk failed; nothing was committed, and a
                repetition resumes.
        """
        await asyncio.to_thread(self._state.load)
        if self._state.version is None:
            raise StorageError(f"{self._name} has not been pulled, so its changes are unknown")
        return await self._push(writer=writer, limits=limits, is_quiet=is_quiet)

    async def _push(
        self,
        *,
        writer: Writer | LeaseWriter | None = None,
        limits: AreaLimits = UNLIMITED,
        is_quiet: bool = False,
    ) -> Pushed:
        scan = await asyncio.to_thread(scan_directory, self._directory, self._state.known)
        self._require_room(scan, limits)
        changed: list[Known] = []
        for start in range(0, len(scan.changed), _BATCH):
            changed += await self._store(scan.changed[start : start + _BATCH], scan)
        if is_quiet:
            again = await asyncio.to_thread(scan_directory, self._directory, self._state.known)
            if again.differences != scan.differences:
                return Pushed(area=None, left_out=again.left_out, is_busy=True)
        put = [one.entry for one in changed]
        expected: dict[str, Entry | None] | None = None
        if self._refuses:
            known = self._state.known
            paths = [*(entry.path for entry in put), *scan.removed]
            expected = {path: known[path].entry if path in known else None for path in paths}
        if not put and not scan.removed:
            if scan.unchanged:
                async with self._database.begin() as tx:
                    await self._touch(tx, scan)
                for one in scan.unchanged:  # so that the next push does not read them
                    self._state.keep(one)
                await self._settle(self._state.version or 0)
            return Pushed(area=None, left_out=scan.left_out)
        async with self._database.begin() as tx:
            if scan.unchanged:
                await self._touch(tx, scan)
            area = await tx.files.commit(
                self._name, put=put, removed=scan.removed, writer=writer, limits=limits, expected=expected
            )
        for path in scan.removed:
            self._state.forget(path)
        for one in (*changed, *scan.unchanged):
            self._state.keep(one)
        # Others may have committed since the last pull; then the next one brings their changes.
        version = self._state.version or 0
        await self._settle(area.version if area.version == version + 1 else version)
        return Pushed(area=area, left_out=scan.left_out)

    async def _touch(self, tx: Transaction, scan: Scan) -> None:
        """Let retention count from now for files that a program has written again as they were."""
        await tx.files.touch(self._name, [one.entry.path for one in scan.unchanged])

    def _require_room(self, scan: Scan, limits: AreaLimits) -> None:
        """Refuse a change before its contents are stored; the commit decides."""
        if scan.names >= MOST_NAMES:
            raise InvalidValueError(f"{self._name} has more than {MOST_NAMES} names; delete some of them")
        known = self._state.known.values()
        grows = scan.names - len(known), scan.bytes - sum(one.entry.bytes for one in known)
        require_room(self._name, limits, names=scan.names, size=scan.bytes, grows=grows)

    async def _adopt(self) -> Area | None:
        """Commit what the directory has from the time when files were not in a store.

        The state is written afterwards: with one, a later use would take these files for those of a program
        that was killed, and remove them.
        """
        await asyncio.to_thread(make_directory, self._directory, passable=True)
        self._state.version = 0
        pushed = await self._push()
        if pushed.area is None:
            await self._settle(0)
        return pushed.area

    async def _begin(self) -> None:
        """Take what the directory has as changes of an area that had nothing."""
        await asyncio.to_thread(make_directory, self._directory)
        await self._settle(0)

    async def _settle(self, version: int) -> None:
        self._state.version = version
        await asyncio.to_thread(self._state.save)

    async def _changes(self, tx: Transaction, area: Area) -> tuple[list[Entry], list[str]]:
        """Return what the area has at paths that changed since the known version, and paths that are gone."""
        if self._state.is_recent():
            return await tx.files.changes(area, since=self._state.version or 0)
        entries = await tx.files.entries(area)
        return entries, [*self._state.known.keys() - {entry.path for entry in entries}]

    def _give_way(self, present: Sequence[Entry], gone: Sequence[str]) -> list[Entry]:
        """Remove files that are gone or replaced, unless they were changed here; returns what to copy.

        The known state of a file that both changed decides whether a push may replace the other's version.
        """
        for path in sorted(gone, key=lambda path: -path.count("/")):
            is_untouched = self._is_untouched(path)
            if is_untouched:
                self._remove(path)
            if is_untouched or not self._refuses:
                self._state.forget(path)
        copied = []
        for entry in sorted(present, key=lambda entry: entry.path.count("/")):
            if not self._is_untouched(entry.path):
                if not self._refuses:
                    self._state.keep(Known(entry=entry, stat=NO_STAT))
                elif (info := self._info_of_same(entry)) is not None:
                    # A process that brought or committed it died before it could take note.
                    self._state.keep(Known(entry=entry, stat=stat_of(info)))
                continue
            if entry.content_id is None:
                known = self._state.known.get(entry.path)
                if known is not None and known.stat is not None:
                    self._remove(entry.path)
                with safe_files.parent_of(self._directory, f"{entry.path}/any"):
                    self._state.keep(Known(entry=entry))
                continue
            if self._has_no_directory_at(entry):
                copied.append(entry)
        return copied

    def _has_no_directory_at(self, entry: Entry) -> bool:
        """Remove the directory that a file replaces; False if it has files that were added here."""
        known = self._state.known.get(entry.path)
        if known is None or known.stat is not None:
            return True
        if safe_files.remove_empty(self._directory, entry.path):
            self._state.forget(entry.path)
            return True
        if not self._refuses:
            self._state.keep(Known(entry=entry, stat=NO_STAT))
        return False

    def _is_untouched(self, path: str) -> bool:
        """Whether the directory has a path as it is known; also if both have nothing."""
        known = self._state.known.get(path)
        try:
            info = safe_files.info_of(self._directory, path)
        except FileNotFoundError:
            return known is None
        except InvalidValueError:  # a link is in its way, or a file
            return False
        if known is None:
            return False
        if known.stat is None:
            return stat.S_ISDIR(info.st_mode)
        return known.stat == stat_of(info)

    def _info_of_same(self, entry: Entry) -> os.stat_result | None:
        """Return the status of the file at the path of an entry if it has the same bytes."""
        try:
            with safe_files.open_file(self._directory, entry.path) as file:
                info = os.fstat(file.fileno())
                is_same = info.st_size == entry.bytes and safe_files.sha256_of(file) == entry.sha256
                return info if is_same else None
        except (FileNotFoundError, InvalidValueError):
            return None

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, InvalidValueError):
            if not safe_files.remove_empty(self._directory, path):
                safe_files.remove_file(self._directory, path)

    def _prepare(self, wanted: dict[str, Entry]) -> dict[str, Known]:
        """Remove what is not wanted or was changed, and make directories; returns what is right already."""
        make_directory(self._directory, passable=True)
        remove_hidden(self._directory)
        before = self._state.known
        known: dict[str, Known] = {}
        doomed: list[str] = []
        present = [(node.path, node.info) for node in walk(self._directory, max_entries=MOST_NAMES)]
        for path, info in present:
            entry = wanted.get(path)
            if entry is not None and entry.content_id is None and stat.S_ISDIR(info.st_mode):
                known[path] = Known(entry=entry)
            elif entry is not None and _is_copied(entry, before.get(path), info):
                known[path] = Known(entry=entry, stat=stat_of(info))
            else:
                doomed.append(path)
        # What a directory holds comes before it.
        for path in sorted(doomed, key=lambda path: -path.count("/")):
            if not safe_files.remove_empty(self._directory, path):
                with contextlib.suppress(FileNotFoundError):
                    safe_files.remove_file(self._directory, path)
        gone = set(doomed)
        undone = sum(path in gone and not _is_known(before.get(path), info) for path, info in present)
        if undone:
            logger.bind(area=self._name, count=undone).warning("local_files_undone")
        for path, entry in wanted.items():
            if entry.content_id is None and path not in known:
                with safe_files.parent_of(self._directory, f"{path}/any"):
                    known[path] = Known(entry=entry)
        return known

    async def _copy(self, entries: Sequence[Entry]) -> None:
        waiting = iter(entries)

        async def copy_some() -> None:
            for entry in waiting:
                if entry.content_id is None:  # a directory, which exists
                    continue
                name = f"{self._name}/{entry.path}"
                with _disk_errors(name, self._directory):
                    cached = await self._contents.fetch(
                        entry.content_id, entry.sha256, entry.bytes, name=name
                    )
                    placed = await in_thread(_place, self._directory, entry, cached)
                self._state.keep(Known(entry=entry, stat=placed))

        if entries:
            await run_together(*(copy_some() for _ in range(min(_COPIES, len(entries)))))

    async def _store(self, paths: Sequence[tuple[str, os.stat_result]], scan: Scan) -> list[Known]:
        """Store the contents of changed files; returns the entries that differ from the known ones."""
        cached = await asyncio.to_thread(self._take, paths, scan)
        for path, (content, info) in [*cached.items()]:
            known = self._state.known.get(path)
            if known is not None and content is not None and _is_same(known.entry, content, info):
                scan.unchanged.append(Known(entry=known.entry, stat=stat_of(info)))
                del cached[path]
        if not cached:
            return []
        rows = await self._contents.put([content for content, _ in cached.values() if content is not None])
        stored = []
        for path, (content, info) in cached.items():
            if content is None:
                stored.append(Known(entry=Entry(path=path)))
                continue
            entry = Entry(
                path=path,
                content_id=rows[content.sha256].id,
                sha256=content.sha256,
                bytes=content.bytes,
                is_executable=bool(info.st_mode & stat.S_IXUSR),
                modified_ns=info.st_mtime_ns,
            )
            stored.append(Known(entry=entry, stat=stat_of(info)))
        return stored

    def _take(
        self, paths: Iterable[tuple[str, os.stat_result]], scan: Scan
    ) -> dict[str, tuple[CachedContent | None, os.stat_result]]:
        """Copy files to the cache, where they no longer change."""
        taken: dict[str, tuple[CachedContent | None, os.stat_result]] = {}
        for path, info in paths:
            if stat.S_ISDIR(info.st_mode):
                taken[path] = None, info
                continue
            try:
                with safe_files.open_file(self._directory, path) as file:
                    now = settled(file.fileno())
                    # What a program appends meanwhile is of the next version, which a scan finds by its size.
                    # Only the size that was scanned is within the limits.
                    taken_info = info if now.st_size > info.st_size else now
                    content = self._contents.cache.add(file, most_bytes=taken_info.st_size)
                    taken[path] = content, taken_info
            except FileNotFoundError:  # a program that still runs removed it
                scan.left_out[ascii(path)] = "it was removed during the scan"
            except (InvalidValueError, PermissionError) as exc:
                scan.left_out[ascii(path)] = str(exc)
        return taken


@contextlib.contextmanager
def _disk_errors(name: str, directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise StorageUnavailableError(
            f"{name} cannot be written below {directory}: {exc.strerror}; free space on its disk, and check "
            "its permissions"
        ) from exc


def _copy_aside(directory: Path, path: str, aside: Path) -> None:
    with contextlib.suppress(FileNotFoundError, InvalidValueError):  # a program that still runs removed it
        make_directory((aside / path).parent)
        safe_files.copy_out(directory, path, destination=aside / path, max_bytes=sys.maxsize)


def _is_same(entry: Entry, content: CachedContent, info: os.stat_result) -> bool:
    """Whether a file that was changed is as it was: only its owner, its mode or its inode differ."""
    return (entry.sha256, entry.is_executable, entry.modified_ns) == (
        content.sha256,
        bool(info.st_mode & stat.S_IXUSR),
        info.st_mtime_ns,
    )


def _is_known(known: Known | None, info: os.stat_result) -> bool:
    """Whether a file or directory is as it was brought or committed."""
    if known is None:
        return False
    return stat.S_ISDIR(info.st_mode) if known.stat is None else known.stat == stat_of(info)


def _is_copied(entry: Entry, known: Known | None, info: os.stat_result) -> bool:
    return known is not None and known.entry == entry and known.stat == stat_of(info)


def _place(directory: Path, entry: Entry, cached: CachedContent) -> FileStat:
    """Copy a content to its path; the file appears complete."""
    temporary = f".{secrets.token_hex(8)}.part"  # as _UNFINISHED
    with safe_files.parent_of(directory, entry.path) as (parent_fd, name), cached.path.open("rb") as source:
        try:
            safe_files.create_file(parent_fd, temporary, source)
            if entry.is_executable:
                mode = os.stat(temporary, dir_fd=parent_fd, follow_symlinks=False).st_mode
                os.chmod(temporary, stat.S_IMODE(mode) | mode >> 2 & _OWNER_EXECUTES, dir_fd=parent_fd)
            os.utime(temporary, ns=(entry.modified_ns,) * 2, dir_fd=parent_fd, follow_symlinks=False)
            os.rename(temporary, name, src_dir_fd=parent_fd, dst_dir_fd=parent_fd)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=parent_fd)
            raise
        return stat_of(os.stat(name, dir_fd=parent_fd, follow_symlinks=False))
