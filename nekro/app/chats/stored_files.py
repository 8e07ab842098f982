"""The files of a chat in a store: listed from the manifest, read one by one, changed by commits.

No directory of the area is made. A run or call that uses the area at the same time sees a change with its
next version.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import BinaryIO, Final

from nekro.app.areas.synced import SyncedAreas
from nekro.app.chats.files import ChatFile, ChatFiles, OpenFile, explained, no_shared_space, refuse_larger
from nekro_agent import layout
from nekro_agent.errors import (
    ConflictError,
    FilesQuotaError,
    InvalidValueError,
    NotFoundError,
    UploadQuotaError,
)
from nekro_agent.files.names import chosen_type
from nekro_agent.files.uploads import numbered
from nekro_agent.ports import ChatInfo
from nekro_agent.tools.path_convertor import AREA_NAMES, PathLocation, locate
from storage.engine import Database
from storage.files.cache import CachedContent
from storage.files.host_files import AreaPlace
from storage.files.manifest import Area, Entry
from storage.files.paths import checked_path, folded_path

__all__ = ["StoredFiles"]

#: Names that are looked up at a time.
_NAMES: Final = 100
#: A content is stored again as often if a collection deletes it in between.
_ATTEMPTS: Final = 5


class StoredFiles(ChatFiles):
    """The files of one chat. Use it on threads other than that of the background loop."""

    def __init__(self, areas: SyncedAreas, database: Database, chat: ChatInfo) -> None:
        self._areas = areas
        self._contents = areas.files.contents
        self._database = database
        self._chat = chat

    def list(self, *locations: PathLocation) -> Iterator[ChatFile]:
        """See ``ChatFiles.list``."""
        for location in locations or PathLocation:
            for entry in self._areas.answer(self._entries(self._place(location).name)):
                if entry.content_id is not None and not entry.path.startswith(f"{layout.UNDO_NAME}/"):
                    yield _file(location, entry)

    @contextlib.contextmanager
    def open(self, path: str, *, most_bytes: int | None = None) -> Iterator[OpenFile]:
        """See ``ChatFiles.open``."""
        with explained(path):
            location, entry = self._find(path)
            refuse_larger(path, entry.bytes, most_bytes)
            shown = _shown(location, entry.path)
            work = self._contents.fetch(entry.content_id or 0, entry.sha256, entry.bytes, name=shown)
            with self._areas.answer(work).path.open("rb") as file:
                yield OpenFile(
                    path=shown,
                    size_bytes=entry.bytes,
                    modified_ns=entry.modified_ns,
                    file=file,
                    sha256=entry.sha256,
                )

    def find(self, path: str) -> ChatFile:
        """See ``ChatFiles.find``."""
        with explained(path):
            location, entry = self._find(path)
        return _file(location, entry)

    def types_of(self, files: Sequence[ChatFile]) -> Sequence[str]:
        """See ``ChatFiles.types_of``; no content is read."""
        by_area: defaultdict[PathLocation, list[str]] = defaultdict(list)
        for file in files:
            location, relative = locate(file.path)
            by_area[location].append(str(relative))
        types: dict[str, str | None] = {}
        for location, paths in by_area.items():
            found = self._areas.answer(self._media_types(self._place(location).name, paths))
            types |= {_shown(location, path): media_type for path, media_type in found.items()}
        return [chosen_type(PurePosixPath(file.path).name, types.get(file.path)) for file in files]

    def remove(self, path: str) -> None:
        """See ``ChatFiles.remove``."""
        with explained(path):
            location, relative = self._locate(path)
            self._areas.answer(self._remove(self._place(location).name, _path_of(relative)))

    def _locate(self, path: str) -> tuple[PathLocation, PurePosixPath]:
        location, relative = locate(path)
        # As the links of these names do, which only the directory of a run has.
        while (
            location is PathLocation.SHARED
            and relative.parts
            and (first := relative.parts[0]) in AREA_NAMES
            and self._look_up(location, first) is None
        ):
            location, relative = PathLocation(first), PurePosixPath(*relative.parts[1:])
        return location, relative

    def _put(self, location: PathLocation, relative: PurePosixPath, file: BinaryIO) -> None:
        path, place = _path_of(relative), self._place(location)
        size = os.fstat(file.fileno()).st_size
        with _quota(location, path, size):
            self._areas.answer(self._require_room(place, path, size))
            content = self._contents.cache.adopt(file)
            self._areas.answer(self._commit(place, path, content))

    def _add(self, name: str, source: bytes | BinaryIO, *, numbers: bool) -> str:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        size = len(source) if isinstance(source, bytes) else os.fstat(file.fileno()).st_size
        place = self._place(PathLocation.UPLOADS)
        with _quota(PathLocation.UPLOADS, checked_path(name), size):
            self._areas.answer(self._require_room(place, None, size))
            cache = self._contents.cache
            content = cache.add(file) if isinstance(source, bytes) else cache.adopt(source)
            return self._areas.answer(self._commit_new(place, name, content, numbers=numbers))

    def _find(self, path: str) -> tuple[PathLocation, Entry]:
        location, relative = self._locate(path)
        entry = self._look_up(location, _path_of(relative))
        if entry is None:
            raise FileNotFoundError(path)
        if entry.content_id is None:
            raise IsADirectoryError(path)
        return location, entry

    def _look_up(self, location: PathLocation, path: str) -> Entry | None:
        _, found = self._areas.answer(self._at(self._place(location).name, [path]))
        entry = found.get(folded_path(path))
        return entry if entry is not None and entry.path == path else None

    def _place(self, location: PathLocation) -> AreaPlace:
        if location is PathLocation.UPLOADS:
            return self._areas.uploads(self._chat.chat_key)
        return self._areas.shared(self._chat.container_key)

    async def _entries(self, name: str) -> Sequence[Entry]:
        async with self._database.read() as tx:
            area = await tx.files.find(name)
            return [] if area is None else await tx.files.entries(area)

    async def _at(self, name: str, paths: Sequence[str]) -> tuple[Area | None, dict[str, Entry]]:
        async with self._database.read() as tx:
            area = await tx.files.find(name)
            return area, {} if area is None else await tx.files.present(area, paths)

    async def _media_types(self, name: str, paths: Sequence[str]) -> dict[str, str | None]:
        async with self._database.read() as tx:
            return await tx.files.media_types(name, paths)

    async def _require_room(self, place: AreaPlace, path: str | None, size: int) -> None:
        """Refuse a file before its content is copied; the commit decides."""
        limits = place.limits
        area, found = await self._at(place.name, [] if path is None else [path])
        old = next(iter(found.values()), None)
        if old is not None and old.content_id is None:
            raise IsADirectoryError(path)
        wanted_bytes = (area.bytes if area else 0) + size - (old.bytes if old else 0)
        wanted_names = (area.names if area else 0) + (old is None)
        exceeds_bytes = limits.bytes and wanted_bytes > limits.bytes
        if exceeds_bytes or (limits.names and wanted_names > limits.names and old is None):
            raise FilesQuotaError(
                area=place.name,
                wanted_bytes=wanted_bytes,
                limit_bytes=limits.bytes,
                wanted_names=wanted_names,
                limit_names=limits.names,
                setting=limits.setting,
            )

    async def _commit(
        self, place: AreaPlace, path: str, content: CachedContent, *, is_new: bool = False
    ) -> None:
        for left in reversed(range(_ATTEMPTS)):
            row = (await self._contents.put([content]))[content.sha256]
            entry = Entry(
                path=path,
                content_id=row.id,
                sha256=content.sha256,
                bytes=content.bytes,
                modified_ns=time.time_ns(),
            )
            try:
                async with self._database.begin() as tx:
                    await tx.files.commit(
                        place.name,
                        put=[entry],
                        limits=place.limits,
                        expected={path: None} if is_new else None,
                    )
                return
            except NotFoundError:
                if not left:
                    raise

    async def _commit_new(self, place: AreaPlace, name: str, content: CachedContent, *, numbers: bool) -> str:
        names = numbered(name) if numbers else iter([name])
        while some := [*itertools.islice(names, _NAMES)]:
            area, found = await self._at(place.name, some)
            for candidate in some:
                old = found.get(folded_path(candidate))
                try:
                    if old is None:
                        await self._commit(place, candidate, content, is_new=True)
                        return candidate
                except (ConflictError, InvalidValueError):  # another file got the name meanwhile
                    return await self._commit_new(place, name, content, numbers=numbers)
                if area is not None and old.path == candidate and old.sha256 == content.sha256:
                    async with self._database.begin() as tx:  # retention counts from the last use
                        await tx.files.touch(place.name, [candidate])
                    return candidate
        raise FileExistsError(name)

    async def _remove(self, name: str, path: str) -> None:
        area, found = await self._at(name, [path])
        entry = found.get(folded_path(path))
        if area is None or entry is None or entry.path != path:
            raise FileNotFoundError(path)
        if entry.content_id is None:
            raise IsADirectoryError(path)
        async with self._database.begin() as tx:
            await tx.files.commit(name, removed=[path], expected={path: entry})


@contextlib.contextmanager
def _quota(location: PathLocation, name: str, size: int) -> Iterator[None]:
    """Raise what callers know of full areas."""
    try:
        yield
    except FilesQuotaError as exc:
        if location is PathLocation.SHARED:
            used = exc.wanted_bytes - size
            raise no_shared_space(name, size, used=used, most=exc.limit_bytes) from exc
        raise UploadQuotaError(
            name=name,
            size_bytes=size,
            used_bytes=exc.wanted_bytes - size,
            limit_bytes=exc.limit_bytes,
            used_names=exc.wanted_names - 1,
            limit_names=exc.limit_names,
        ) from exc


def _file(location: PathLocation, entry: Entry) -> ChatFile:
    return ChatFile(path=_shown(location, entry.path), size_bytes=entry.bytes, modified_ns=entry.modified_ns)


def _shown(location: PathLocation, path: str) -> str:
    return f"{layout.SANDBOX_ROOT}/{location.value}/{path}"


def _path_of(relative: PurePosixPath) -> str:
    """Return a path within an area.

    Raises:
        InvalidValueError: no file of an area can have it.
        IsADirectoryError: it is the area itself.
    """
    if not relative.parts:
        raise IsADirectoryError(str(relative))
    return checked_path(str(relative))
