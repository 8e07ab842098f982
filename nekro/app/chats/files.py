"""The files of one chat: what its sandboxes see below ``/app/uploads`` and ``/app/shared``."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from nekro.app.chats.attachments import Attachment
from nekro_agent import layout
from nekro_agent.errors import (
    ConflictError,
    InvalidValueError,
    NotFoundError,
    UploadQuotaError,
    UsageError,
)
from nekro_agent.files import safe_files
from nekro_agent.files.areas import safe_basename
from nekro_agent.files.names import HEAD_BYTES, IMAGE_TYPES, content_type
from nekro_agent.tools.path_convertor import PathLocation

__all__ = ["ChatFile", "ChatFiles", "OpenFile", "explained", "no_shared_space", "refuse_larger"]


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


@dataclass(frozen=True, kw_only=True)
class OpenFile(ChatFile):
    """A file that is open for reading."""

    file: BinaryIO
    #: SHA-256 in hexadecimal; None if the content must be read for it.
    sha256: str | None = None


class ChatFiles(abc.ABC):
    """Reads and writes the two areas of a chat; blocking. Links are never followed."""

    @abc.abstractmethod
    def list(self, *locations: PathLocation) -> Iterator[ChatFile]:
        """Yield the files of some areas, or of both if none is named, in no order.

        Raises:
            ServiceError: the shared area is not mounted on this host.
        """

    @abc.abstractmethod
    def open(
        self, path: str, *, most_bytes: int | None = None
    ) -> contextlib.AbstractContextManager[OpenFile]:
        """Open a file for reading.

        Args:
            most_bytes: a larger file is refused.

        Raises:
            UsageError: the path is in neither area, contains ``..``, follows a link, or is not an ordinary
                file, or the file is too large.
            NotFoundError: there is no such file.
            ServiceError: as ``list``.
            DamagedFileError, StorageUnavailableError: the store has not its content, or does not answer.
        """

    @abc.abstractmethod
    def find(self, path: str) -> ChatFile:
        """Return the file of a path as sandboxed code may write it.

        Raises:
            UsageError, NotFoundError, ServiceError: as ``open``.
        """

    @abc.abstractmethod
    def types_of(self, files: Sequence[ChatFile]) -> Sequence[str]:
        """Return the media types of files; by their names alone if they cannot be opened any more."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file.

        Raises:
            UsageError, NotFoundError, ServiceError: as ``open``.
            ConflictError: it was replaced meanwhile.
        """

    def put(self, name: str, file: BinaryIO, path: str | None = None) -> Attachment:
        """Store a file in either area, replacing a file of its name.

        Args:
            name: used where ``path`` names none.
            path: where to store it; one that ends in ``/`` is a directory. None means the uploads.

        Raises:
            UsageError: the path is not acceptable, or the area has no space for it.
        """
        path = f"{layout.SANDBOX_UPLOADS}/" if path is None else path
        with explained(path):
            is_area = path.strip("/") in ("uploads", "shared", "app/uploads", "app/shared")
            if path.endswith("/") or is_area:
                path = f"{path.rstrip('/')}/{safe_basename(name)}"
            location, relative = self._locate(path)
            if location is PathLocation.UPLOADS and len(relative.parts) != 1:
                raise UsageError(
                    f"the uploads have no folders; write {layout.SANDBOX_UPLOADS}/{relative.name}"
                )
            self._put(location, relative, file)
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
        try:
            stored = self._add(name, source, numbers=numbers)
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
        with self.open(path) as opened:
            head = opened.file.read(HEAD_BYTES)
            opened.file.seek(0)
            digest = opened.sha256 or safe_files.sha256_of(opened.file)
        shown = name or PurePosixPath(path).name
        media_type = content_type(shown, head)
        return Attachment(
            kind="image" if media_type in IMAGE_TYPES else "file",
            path=path,
            name=shown,
            media_type=media_type,
            size_bytes=opened.size_bytes,
            sha256=digest,
            modified_ns=opened.modified_ns,
        )

    def add_file(self, source: Path) -> Attachment:
        """Store a file of this host in the uploads for a message, as ``add`` does.

        Raises:
            UsageError: it is not an ordinary file, cannot be read, or the uploads have no space for it.
        """
        with explained(source.name), _ordinary(source) as file:
            return self.add(source.name, file)

    @abc.abstractmethod
    def _locate(self, path: str) -> tuple[PathLocation, PurePosixPath]:
        """Return the area of a path, and the path in it; see ``locate``."""

    @abc.abstractmethod
    def _put(self, location: PathLocation, relative: PurePosixPath, file: BinaryIO) -> None:
        """Store a file, replacing one of its name."""

    @abc.abstractmethod
    def _add(self, name: str, source: bytes | BinaryIO, *, numbers: bool) -> str:
        """Store a file in the uploads under a name that is not in use; returns the name.

        Raises:
            FileExistsError: the name is in use and may not get a number.
        """


def refuse_larger(path: str, size_bytes: int, most_bytes: int | None) -> None:
    """Raise ``InvalidValueError`` if a file has more than a number of bytes."""
    if most_bytes is not None and size_bytes > most_bytes:
        raise InvalidValueError(f"{path} has {size_bytes} bytes; at most {most_bytes} are read")


def no_shared_space(name: str, size: int, *, used: int, most: int) -> UsageError:
    """Return the error for a file that does not fit into the shared area."""
    return UsageError(
        f"{name!r} ({size} bytes) does not fit into {layout.SANDBOX_SHARED}: it holds {used} of {most} bytes "
        "(NEKRO_SANDBOX__SHARED_BYTES)"
    )


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Translate what the file system and the areas refuse.

    Raises:
        UsageError: the path or the file is not acceptable.
        NotFoundError: there is no such file.
    """
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
