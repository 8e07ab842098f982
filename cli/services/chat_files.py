"""The files of one chat: what its sandboxes see below ``/app/uploads`` and ``/app/shared``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from broker_config.embedded import resolve_signing_key
from broker_config.settings import Settings
from nekro_agent import layout
from nekro_agent.errors import InvalidValueError, NotFoundError, ServiceError, UploadQuotaError, UsageError
from nekro_agent.files import safe_files
from nekro_agent.files.area_access import safe_basename
from nekro_agent.files.uploads import UploadArea
from nekro_agent.policies import UploadPolicy
from nekro_agent.ports import ChatInfo
from nekro_agent.tools.path_convertor import PathLocation, locate
from storage.files.areas import DataAreas
from storage.files.upload_areas import UploadAreas

__all__ = ["ChatFile", "ChatFiles"]

#: Most names of an area that are looked at.
_MOST_NAMES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ChatFile:
    """One file."""

    #: As sandboxed code sees it; bytes that are not UTF-8 are written as ``\\xNN``.
    path: str
    size_bytes: int
    #: Seconds since the epoch.
    modified_at: float


class ChatFiles:
    """Reads and writes the two areas of a chat; blocking. Links are never followed."""

    def __init__(self, settings: Settings, chat: ChatInfo) -> None:
        """Open the areas of a chat; ``settings`` as the workers have them."""
        self._settings = settings
        self._chat = chat
        key = resolve_signing_key(settings).get_secret_value()
        self._upload_areas = UploadAreas(settings.database, settings.data_dir, key=key)
        self._areas = DataAreas(settings.data_dir, uploads=self._upload_areas)

    def close(self) -> None:
        """Close the connections to the database."""
        self._upload_areas.dispose()

    def list(self) -> Iterator[ChatFile]:
        """Yield the files of both areas, in no order.

        Raises:
            ServiceError: the shared area is not mounted on this host.
        """
        for location in PathLocation:
            for entry in safe_files.list_files(self._readable(location), max_entries=_MOST_NAMES):
                shown = os.fsencode(entry.path).decode("utf-8", "backslashreplace")
                yield ChatFile(
                    path=f"{layout.SANDBOX_ROOT}/{location.value}/{shown}",
                    size_bytes=entry.size_bytes,
                    modified_at=entry.modified_at,
                )

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Open a file for reading.

        Raises:
            UsageError: the path is in neither area, contains ``..``, follows a link, or is no ordinary file.
            NotFoundError: there is no such file.
            ServiceError: as ``list``.
        """
        with _explained(path):
            location, relative = locate(path)
            with safe_files.open_file(self._readable(location), relative) as file:
                yield file

    def put(self, source: Path, path: str | None = None) -> str:
        """Store a file of this host, replacing a file of its name; returns its path in the sandbox.

        Args:
            path: where to store it; one that ends in ``/`` is a directory. None means the uploads.

        Raises:
            UsageError: the path is not acceptable, the source is no ordinary file or cannot be read, or the
                area has no space for it.
        """
        path = f"{layout.SANDBOX_UPLOADS}/" if path is None else path
        with _explained(path):
            is_area = path.strip("/") in ("uploads", "shared", "app/uploads", "app/shared")
            if path.endswith("/") or is_area:
                path = f"{path.rstrip('/')}/{safe_basename(source.name)}"
            location, relative = locate(path)
            with _ordinary(source) as file:
                if location is PathLocation.UPLOADS:
                    self._put_upload(relative, file)
                else:
                    self._put_shared(relative, file)
        return f"{layout.SANDBOX_ROOT}/{location.value}/{relative}"

    def _put_upload(self, relative: PurePosixPath, file: BinaryIO) -> None:
        if len(relative.parts) != 1:
            raise UsageError(f"the uploads have no folders; write {layout.SANDBOX_UPLOADS}/{relative.name}")
        limits = self._settings.uploads
        policy = UploadPolicy(chat_bytes=limits.chat_bytes, chat_names=limits.chat_names)
        UploadArea(self._areas.uploads_dir(self._chat.chat_key), policy).put(relative.name, file)

    def _put_shared(self, relative: PurePosixPath, file: BinaryIO) -> None:
        area = self._areas.shared_dir(self._chat.container_key)
        size, most = os.fstat(file.fileno()).st_size, self._settings.sandbox.shared_bytes
        used, _ = safe_files.measure(area, max_entries=_MOST_NAMES)
        if used + size > most:
            raise UsageError(
                f"{relative.name!r} ({size} bytes) does not fit into {layout.SANDBOX_SHARED}: it holds "
                f"{used} of {most} bytes (NEKRO_SANDBOX__SHARED_BYTES)"
            )
        safe_files.replace_file(area, relative, file)

    def _readable(self, location: PathLocation) -> Path:
        if location is PathLocation.UPLOADS:
            return self._areas.uploads_dir(self._chat.chat_key)
        from sandbox.areas.images import is_unmounted

        area = self._areas.shared_dir(self._chat.container_key)
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
