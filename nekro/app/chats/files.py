"""The files of one chat: what its sandboxes see below ``/app/uploads`` and ``/app/shared``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from broker_config.settings import Settings
from nekro.app.chats.attachments import Attachment
from nekro_agent import layout
from nekro_agent.errors import (
    ConflictError,
    InvalidValueError,
    NotFoundError,
    ServiceError,
    UploadQuotaError,
    UsageError,
)
from nekro_agent.files import safe_files
from nekro_agent.files.areas import safe_basename
from nekro_agent.files.names import HEAD_BYTES, IMAGE_TYPES, content_type
from nekro_agent.files.uploads import UploadArea
from nekro_agent.ports import ChatInfo
from nekro_agent.runtime import UploadPolicy
from nekro_agent.tools.path_convertor import PathLocation, locate
from storage.files import DataAreas

__all__ = ["ChatFile", "ChatFiles"]

#: Most names of an area that are looked at.
_MOST_NAMES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ChatFile:
    """One file."""

    #: As sandboxed code sees it; bytes that are not UTF-8 are written as ``\\xNN``.
    path: str
    size_bytes: int
    #: Last change of the content, in nanoseconds since the epoch.
    modified_ns: int

    @property
    def modified_at(self) -> float:
        """The same in seconds."""
        return self.modified_ns / 1e9


class ChatFiles:
    """Reads and writes the two areas of a chat; blocking. Links are never followed."""

    def __init__(self, settings: Settings, areas: DataAreas, chat: ChatInfo) -> None:
        """Open the areas of a chat; ``settings`` as the workers have them."""
        self._settings = settings
        self._areas = areas
        self._chat = chat

    def list(self, *locations: PathLocation) -> Iterator[ChatFile]:
        """Yield the files of some areas, or of both if none is named, in no order.

        Raises:
            ServiceError: the shared area is not mounted on this host.
        """
        for location in locations or PathLocation:
            for entry in safe_files.list_files(self._readable(location), max_entries=_MOST_NAMES):
                shown = os.fsencode(entry.path).decode("utf-8", "backslashreplace")
                yield ChatFile(
                    path=f"{layout.SANDBOX_ROOT}/{location.value}/{shown}",
                    size_bytes=entry.size_bytes,
                    modified_ns=entry.modified_ns,
                )

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Open a file for reading.

        Raises:
            UsageError: the path is in neither area, contains ``..``, follows a link, or is not an ordinary
                file.
            NotFoundError: there is no such file.
            ServiceError: as ``list``.
        """
        with _explained(path):
            location, relative = locate(path, self._readable)
            with safe_files.open_file(self._readable(location), relative) as file:
                yield file

    def type_of(self, path: str) -> str:
        """Return the media type of a file; by its name alone if it cannot be opened any more."""
        head = b""
        with contextlib.suppress(UsageError, NotFoundError, ServiceError), self.open(path) as file:
            head = file.read(HEAD_BYTES)
        return content_type(PurePosixPath(path).name, head)

    def find(self, path: str) -> ChatFile:
        """Return the file of a path as sandboxed code may write it.

        Raises:
            UsageError, NotFoundError, ServiceError: as ``open``.
        """
        with self.open(path) as file:
            info = os.fstat(file.fileno())
            location, relative = locate(path, self._readable)
        return ChatFile(
            path=f"{layout.SANDBOX_ROOT}/{location.value}/{relative}",
            size_bytes=info.st_size,
            modified_ns=info.st_mtime_ns,
        )

    def put(self, name: str, file: BinaryIO, path: str | None = None) -> Attachment:
        """Store a file in either area, replacing a file of its name.

        Args:
            name: used where ``path`` names none.
            path: where to store it; one that ends in ``/`` is a directory. None means the uploads.

        Raises:
            UsageError: the path is not acceptable, or the area has no space for it.
        """
        path = f"{layout.SANDBOX_UPLOADS}/" if path is None else path
        with _explained(path):
            is_area = path.strip("/") in ("uploads", "shared", "app/uploads", "app/shared")
            if path.endswith("/") or is_area:
                path = f"{path.rstrip('/')}/{safe_basename(name)}"
            location, relative = locate(path, self._area)
            if location is PathLocation.UPLOADS:
                self._put_upload(relative, file)
            else:
                self._put_shared(relative, file)
        return self.describe(f"{layout.SANDBOX_ROOT}/{location.value}/{relative}")

    def add(self, name: str, source: bytes | BinaryIO, *, numbers: bool = True) -> Attachment:
        """Store a file in the uploads for a message, under a name that is not in use.

        Args:
            name: as a client states it; only its last component is used.
            numbers: whether it may get a number before its suffix.

        Raises:
            InvalidValueError: nothing usable is left of the name.
            UploadQuotaError: the uploads have no space for it.
            ConflictError: the name is in use and may not get a number.
        """
        name = safe_basename(name)
        area = self._areas.uploads_dir(self._chat.chat_key)
        try:
            stored = UploadArea(area, self._policy).add(name, source, numbers=numbers)
        except FileExistsError as exc:
            raise ConflictError(
                f"the chat has another file {name!r}; delete it first, or use another name"
            ) from exc
        return self.describe(f"{layout.SANDBOX_UPLOADS}/{stored}", name=name)

    def describe(self, path: str, *, name: str | None = None) -> Attachment:
        """Return the facts of a file, as a message keeps them.

        Args:
            name: name that people see; None means that of the path.

        Raises:
            UsageError, NotFoundError, ServiceError: as ``open``.
        """
        with self.open(path) as file:
            info = os.fstat(file.fileno())
            head = file.read(HEAD_BYTES)
            file.seek(0)
            digest = safe_files.sha256_of(file)
        shown = name or PurePosixPath(path).name
        media_type = content_type(shown, head)
        return Attachment(
            kind="image" if media_type in IMAGE_TYPES else "file",
            path=path,
            name=shown,
            media_type=media_type,
            size_bytes=info.st_size,
            sha256=digest,
            modified_ns=info.st_mtime_ns,
        )

    def add_file(self, source: Path) -> Attachment:
        """Store a file of this host in the uploads for a message, as ``add`` does.

        Raises:
            UsageError: it is not an ordinary file, cannot be read, or the uploads have no space for it.
        """
        with _explained(source.name), _ordinary(source) as file:
            return self.add(source.name, file)

    def remove(self, path: str) -> None:
        """Remove a file.

        Raises:
            UsageError, NotFoundError, ServiceError: as ``open``.
        """
        with _explained(path):
            location, relative = locate(path, self._readable)
            safe_files.remove_file(self._readable(location), relative)

    @property
    def _policy(self) -> UploadPolicy:
        limits = self._settings.uploads
        return UploadPolicy(chat_bytes=limits.chat_bytes, chat_names=limits.chat_names)

    def _put_upload(self, relative: PurePosixPath, file: BinaryIO) -> None:
        if len(relative.parts) != 1:
            raise UsageError(f"the uploads have no folders; write {layout.SANDBOX_UPLOADS}/{relative.name}")
        UploadArea(self._area(PathLocation.UPLOADS), self._policy).put(relative.name, file)

    def _put_shared(self, relative: PurePosixPath, file: BinaryIO) -> None:
        area = self._readable(PathLocation.SHARED)
        size, most = os.fstat(file.fileno()).st_size, self._settings.sandbox.shared_bytes
        used, _ = safe_files.measure(area, max_entries=_MOST_NAMES)
        if used + size > most:
            raise UsageError(
                f"{relative.name!r} ({size} bytes) does not fit into {layout.SANDBOX_SHARED}: it holds "
                f"{used} of {most} bytes (NEKRO_SANDBOX__SHARED_BYTES)"
            )
        safe_files.replace_file(area, relative, file)

    def _area(self, location: PathLocation) -> Path:
        if location is PathLocation.UPLOADS:
            return self._areas.uploads_dir(self._chat.chat_key)
        return self._areas.shared_dir(self._chat.container_key)

    def _readable(self, location: PathLocation) -> Path:
        area = self._area(location)
        if location is PathLocation.UPLOADS:
            return area
        from nekro.sandbox.images import is_unmounted

        if is_unmounted(area):
            raise ServiceError(
                f"{layout.SANDBOX_SHARED} of this chat is an image that is not mounted on this host; run "
                "this where its rounds run, after its next round"
            )
        return area


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (InvalidValueError, UploadQuotaError) as exc:
        raise UsageError(str(exc)) from exc
    except FileNotFoundError as exc:
        raise NotFoundError(f"the chat has no file {path}; `nekro files list` lists its files") from exc
    except (IsADirectoryError, NotADirectoryError) as exc:
        raise UsageError(f"{path} is a directory, or lies below a file") from exc


@contextlib.contextmanager
def _ordinary(source: Path) -> Iterator[BinaryIO]:
    if not source.is_file():
        what = "is not an ordinary file" if source.exists() else "does not exist"
        raise UsageError(f"{source} {what}")
    try:
        file = source.open("rb")
    except OSError as exc:
        raise UsageError(f"cannot read {source}: {exc.strerror}") from exc
    with file:
        yield file
