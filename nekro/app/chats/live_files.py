"""The files of a chat in directories that all hosts mount."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from broker_config.settings import Settings
from nekro.app.chats.files import ChatFile, ChatFiles, OpenFile, explained, no_shared_space, refuse_larger
from nekro_agent import layout
from nekro_agent.errors import NotFoundError, ServiceError, UsageError
from nekro_agent.files import safe_files
from nekro_agent.files.names import HEAD_BYTES, content_type
from nekro_agent.files.uploads import UploadArea
from nekro_agent.ports import ChatInfo, FileAreas
from nekro_agent.runtime import UploadPolicy
from nekro_agent.tools.path_convertor import PathLocation, locate

__all__ = ["LiveFiles"]

#: Most names of an area that are looked at.
_MOST_NAMES: Final = 1_000_000


class LiveFiles(ChatFiles):
    """The files in the directories of a chat, which all hosts mount."""

    def __init__(self, settings: Settings, areas: FileAreas, chat: ChatInfo) -> None:
        """Open the areas of a chat; ``settings`` as the workers have them."""
        self._settings = settings
        self._areas = areas
        self._chat = chat

    def list(self, *locations: PathLocation) -> Iterator[ChatFile]:
        """See ``ChatFiles.list``."""
        for location in locations or PathLocation:
            for entry in safe_files.list_files(self._readable(location), max_entries=_MOST_NAMES):
                if entry.path.startswith(f"{layout.UNDO_NAME}/"):
                    continue
                shown = os.fsencode(entry.path).decode("utf-8", "backslashreplace")
                yield ChatFile(
                    path=f"{layout.SANDBOX_ROOT}/{location.value}/{shown}",
                    size_bytes=entry.size_bytes,
                    modified_ns=entry.modified_ns,
                )

    @contextlib.contextmanager
    def open(self, path: str, *, most_bytes: int | None = None) -> Iterator[OpenFile]:
        """See ``ChatFiles.open``."""
        with explained(path):
            location, relative = self._locate(path)
            with safe_files.open_file(self._readable(location), relative) as file:
                info = os.fstat(file.fileno())
                refuse_larger(path, info.st_size, most_bytes)
                yield OpenFile(
                    path=f"{layout.SANDBOX_ROOT}/{location.value}/{relative}",
                    size_bytes=info.st_size,
                    modified_ns=info.st_mtime_ns,
                    file=file,
                )

    def find(self, path: str) -> ChatFile:
        """See ``ChatFiles.find``."""
        with self.open(path) as opened:
            return opened

    def types_of(self, files: Sequence[ChatFile]) -> Sequence[str]:
        """See ``ChatFiles.types_of``."""
        return [self._type_of(file.path) for file in files]

    def remove(self, path: str) -> None:
        """See ``ChatFiles.remove``."""
        with explained(path):
            location, relative = self._locate(path)
            safe_files.remove_file(self._readable(location), relative)

    def _type_of(self, path: str) -> str:
        head = b""
        with contextlib.suppress(UsageError, NotFoundError, ServiceError), self.open(path) as opened:
            head = opened.file.read(HEAD_BYTES)
        return content_type(PurePosixPath(path).name, head)

    def _locate(self, path: str) -> tuple[PathLocation, PurePosixPath]:
        return locate(path, self._area)

    def _put(self, location: PathLocation, relative: PurePosixPath, file: BinaryIO) -> None:
        if location is PathLocation.UPLOADS:
            self._uploads.put(relative.name, file)
        else:
            self._put_shared(relative, file)

    def _add(self, name: str, source: bytes | BinaryIO, *, numbers: bool) -> str:
        return self._uploads.add(name, source, numbers=numbers)

    @property
    def _uploads(self) -> UploadArea:
        limits = self._settings.uploads
        policy = UploadPolicy(chat_bytes=limits.chat_bytes, chat_names=limits.chat_names)
        return UploadArea(self._area(PathLocation.UPLOADS), policy)

    def _put_shared(self, relative: PurePosixPath, file: BinaryIO) -> None:
        area = self._readable(PathLocation.SHARED)
        size, most = os.fstat(file.fileno()).st_size, self._settings.sandbox.shared_bytes
        used, _ = safe_files.measure(area, max_entries=_MOST_NAMES)
        if used + size > most:
            raise no_shared_space(relative.name, size, used=used, most=most)
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
