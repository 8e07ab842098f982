"""Private copies of sandbox files for plugin code, removed when the call has ended.

Sandboxed code can replace anything in the shared area at any time, for example a file with a
link to a file of the host. Plugin code therefore never opens a path in it. It gets a path in a
private directory that mirrors one of the area's directories: files of the area are copied there,
and files that the plugin wrote, changed or deleted there are copied back or deleted in the area
when the call ends, or when the plugin forwards the file, without following a link.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, Protocol, TypeAlias

from nekro_agent import layout, runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.durations import STALE_SECONDS
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files
from nekro_agent.files.areas import copy_in, copy_out, shared_place
from nekro_agent.files.private_files import make_directory

__all__ = [
    "CallFiles",
    "call_scope",
    "commit",
    "files_of_call",
    "new_directory",
    "opened",
    "own_directories",
    "place_of",
    "private_path",
    "settle",
    "sweep",
    "temporary_names",
]

_log = get_sub_logger("files")

#: Most files of a private directory that are copied back.
_MAX_FILES: Final = 10_000

#: Most names of temporary files that a call may send or forward.
_MAX_TEMPORARY: Final = 1_000
_TEMPFILE_EVENTS: Final = frozenset({"tempfile.mkstemp", "tempfile.mkdtemp"})

#: Inode, size and modification time: at least one differs after a write.
_State: TypeAlias = tuple[int, int, int]


class CallFiles(Protocol):
    """The files that a call may name by text; see ``nekro_agent.files.file_system.FileSystem``."""

    chat_key: str
    container_key: str

    def open_named(self, text: str) -> AbstractContextManager[BinaryIO]:
        """Open the file that a text names for reading.

        Raises:
            InvalidValueError: it is not a file of this call.
            FileNotFoundError: it no longer exists.
        """
        ...

    def require_target(self, text: str) -> None:
        """Check that a text names a path where this call may write.

        Raises:
            InvalidValueError: it is elsewhere.
        """
        ...


@dataclass(kw_only=True)
class _Mirror:
    """A private directory that mirrors a directory of an area."""

    directory: Path
    area: Path
    parent: PurePosixPath
    #: Files that were copied from the area, with their state at that time.
    copied: dict[str, _State] = field(default_factory=dict)

    def fetch(self, name: str) -> Path:
        """Return the private path of a file; a file that the plugin has not changed is copied again."""
        path = self.directory / name
        if _state(path) != self.copied.get(name):
            return path
        path.unlink(missing_ok=True)
        self.copied.pop(name, None)
        with contextlib.suppress(FileNotFoundError):
            copy_out(self.area, self.parent / name, path)
            state = _state(path)
            if state is not None:
                self.copied[name] = state
        return path

    def settle(self) -> None:
        """Copy changes back to the area; a failure does not stop the remaining files.

        Raises:
            InvalidValueError: the first file that could not be copied back.
        """
        failures: list[InvalidValueError] = []
        present = dict(_files(self.directory))
        for name in self.copied.keys() | present.keys():
            if self.copied.get(name) == present.get(name):
                continue
            try:
                self._carry_over(name, is_present=name in present)
            except (OSError, InvalidValueError) as exc:
                reason = exc.strerror if isinstance(exc, OSError) else str(exc)
                failures.append(InvalidValueError(f"cannot write {self._shown(name)!r}: {reason}"))
        self.copied = present
        if failures:
            raise failures[0]

    def _carry_over(self, name: str, *, is_present: bool) -> None:
        if is_present:
            copy_in(self.area, self.parent / name, self.directory / name)
            return
        with contextlib.suppress(FileNotFoundError):
            safe_files.remove_file(self.area, self.parent / name)

    def _shown(self, name: str) -> str:
        return f"{layout.SANDBOX_SHARED}/{self.parent / name}"


class _Scope:
    """The staged files of one call, hook, command or job; used with ``async with``."""

    # A class and not a generator, to save memory: thousands of calls may wait inside.
    __slots__ = ("_token", "directories", "files", "is_open", "mirrors", "temporary")

    def __init__(self, files: CallFiles | None) -> None:
        self.files = files
        self.directories: list[Path] = []
        #: Names that ``tempfile`` created for this call, newest last.
        self.temporary: dict[str, None] = {}
        self.mirrors: dict[tuple[Path, PurePosixPath], _Mirror] = {}
        self.is_open = True

    async def __aenter__(self) -> None:
        _listen_to_tempfile()
        self._token = _scope.set(self)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self.settle()
            elif issubclass(kind, Exception):
                await self._settle_after_failure()
        finally:
            _scope.reset(self._token)
            self._close()

    async def settle(self) -> None:
        """Copy back everything that was written so far."""
        if any(dict(_files(mirror.directory)) != mirror.copied for mirror in self.mirrors.values()):
            await asyncio.to_thread(self._settle_all)

    async def _settle_after_failure(self) -> None:
        try:
            await self.settle()
        except InvalidValueError as exc:  # the caller gets the original failure
            _log.bind(error=str(exc)).warning("files_of_call_not_copied_back")

    def note_temporary(self, name: str | bytes) -> None:
        """Record a name that ``tempfile`` created; only the newest ones are kept."""
        self.temporary[os.path.abspath(os.fsdecode(name))] = None
        while len(self.temporary) > _MAX_TEMPORARY:
            del self.temporary[next(iter(self.temporary))]

    def _settle_all(self) -> None:
        for mirror in list(self.mirrors.values()):
            mirror.settle()

    def _close(self) -> None:
        self.is_open = False
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)


_scope: ContextVar[_Scope | None] = ContextVar("nekro_staging", default=None)


def new_directory() -> Path:
    """Create a private directory; the surrounding :func:`call_scope`, if any, removes it."""
    directory = Path(tempfile.mkdtemp(dir=make_directory(layout.staging_dir(runtime.data_root()))))
    scope = _current()
    if scope is not None:
        scope.directories.append(directory)
    return directory


def call_scope(
    label: str,
    files: CallFiles | None = None,
    *,
    chat_key: str | None = None,
    container_key: str | None = None,
    plugin_key: str | None = None,
) -> AbstractAsyncContextManager[None]:
    """Stage files for plugin code in the block; at its end copy changes back and clean up.

    With files in a store, the areas that the block used are committed after that. Nothing is copied back or
    committed when the block was cancelled, because files may be incomplete.

    Args:
        label: what runs, such as the full name of a method; see ``FileAreas.scope``.
        files: those of the chat and plugin that are served; None if there is not exactly one.
        chat_key, container_key: whose areas the block probably uses; None: those of ``files``.
        plugin_key: whose code runs.

    Raises:
        ConflictError: another host has changed the same file of the plugin's directory.
        InvalidValueError: a file could not be copied back, for example because a directory has its name.
        FilesQuotaError, StorageUnavailableError, DamagedFileError: files of a store could not be brought or
            committed.
    """
    scope = _Scope(files)
    if not runtime.is_bound() or not (areas := runtime.current().areas).is_synced:
        return scope
    if files is not None:
        chat_key, container_key = chat_key or files.chat_key, container_key or files.container_key
    used = areas.scope(label, chat_key=chat_key, container_key=container_key, plugin_key=plugin_key)
    return _both(used, scope)


@contextlib.asynccontextmanager
async def _both(areas: AbstractAsyncContextManager[object], scope: _Scope) -> AsyncIterator[None]:
    async with areas, scope:
        yield


def files_of_call() -> CallFiles | None:
    """Return the files of the call that this code belongs to; None outside of a chat's calls."""
    scope = _scope.get()
    return None if scope is None else scope.files


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """Open a host file for reading; in a call, a text may name only files of the call.

    Raises:
        InvalidValueError: a text names a file that does not belong to the call, or a link leads to a file of
            a shared area.
        OSError: it cannot be opened.
    """
    files = files_of_call()
    if isinstance(path, str) and files is not None:
        with files.open_named(path) as file:
            yield file
        return
    place = shared_place(Path(path))
    with Path(path).open("rb") if place is None else safe_files.open_file(*place) as file:
        yield file


def own_directories() -> list[Path]:
    """Return the private directories of the current call."""
    scope = _scope.get()
    return [] if scope is None else list(scope.directories)


def temporary_names() -> list[Path]:
    """Return the files and directories that the current call created with ``tempfile``.

    Includes those of tasks that the call left running, and those removed since.
    """
    scope = _scope.get()
    return [] if scope is None else [Path(name) for name in reversed(scope.temporary)]


async def settle() -> None:
    """Copy back everything that the current call wrote so far."""
    scope = _current()
    if scope is not None:
        await scope.settle()


async def commit() -> None:
    """Show other hosts what the current call has changed in its areas; without a store they see it anyway."""
    if runtime.is_bound() and (areas := runtime.current().areas).is_synced:
        await areas.commit()


def private_path(area: Path, relative: PurePosixPath) -> Path | None:
    """Return the private path that mirrors a path in an area.

    None outside of a call, and for a directory.

    Raises:
        InvalidValueError: the path passes through a link, or the file has a second name.
    """
    scope = _current()
    if scope is None or not relative.parts or _is_directory(area, relative):
        return None
    place = (area, relative.parent)
    mirror = scope.mirrors.get(place)
    if mirror is None:
        mirror = _Mirror(directory=new_directory(), area=area, parent=relative.parent)
        scope.mirrors[place] = mirror
    return mirror.fetch(relative.name)


def place_of(path: Path) -> tuple[Path, PurePosixPath] | None:
    """Return the area and the path in it that a private path mirrors; None for any other path."""
    scope = _current()
    for mirror in scope.mirrors.values() if scope else ():
        if path.is_relative_to(mirror.directory) and path != mirror.directory:
            return mirror.area, mirror.parent / path.relative_to(mirror.directory)
    return None


def sweep(root: Path) -> int:
    """Remove leftovers of crashed processes and of code outside of calls; returns their number."""
    base = layout.staging_dir(root)
    if not base.is_dir():
        return 0
    limit = time.time() - STALE_SECONDS
    stale = [entry for entry in base.iterdir() if entry.lstat().st_mtime < limit]
    for entry in stale:
        shutil.rmtree(entry, ignore_errors=True)
    return len(stale)


@functools.cache
def _listen_to_tempfile() -> None:
    """Record names that ``tempfile`` creates, in the call of the current context. Cannot be undone."""
    sys.addaudithook(_on_audit_event)


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    # Runs for every audited action of the process in any thread, so it must return fast for other events.
    if event in _TEMPFILE_EVENTS:
        scope = _scope.get()
        if scope is not None:
            scope.note_temporary(arguments[0])


def _current() -> _Scope | None:
    scope = _scope.get()
    return scope if scope is not None and scope.is_open else None


def _state(path: Path) -> _State | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return (info.st_ino, info.st_size, info.st_mtime_ns)


def _files(directory: Path) -> Iterator[tuple[str, _State]]:
    """Yield the ordinary files below a private directory; links in it are ignored."""
    left = _MAX_FILES
    for folder, _, names in os.walk(directory):
        for name in names:
            left -= 1
            if left < 0:
                _log.bind(most_files=_MAX_FILES).warning("files_of_call_dropped")
                return
            path = Path(folder, name)
            info = path.lstat()
            if stat.S_ISREG(info.st_mode):
                relative = str(path.relative_to(directory))
                yield relative, (info.st_ino, info.st_size, info.st_mtime_ns)


def _is_directory(area: Path, relative: PurePosixPath) -> bool:
    try:
        return stat.S_ISDIR(safe_files.info_of(area, relative).st_mode)
    except FileNotFoundError:
        return False
