"""Converts between paths as sandboxed code sees them and paths of the same files on the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePosixPath

from nekro_agent import layout, runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import staging
from nekro_agent.files.areas import refuse_links

__all__ = [
    "PathLocation",
    "absolute_sandbox_path",
    "convert_filename_to_access_path",
    "convert_filename_to_container_path",
    "convert_filename_to_sandbox_shared_path",
    "convert_filename_to_sandbox_upload_path",
    "convert_filepath_to_sandbox_shared_path",
    "convert_filepath_to_sandbox_upload_path",
    "convert_to_container_path",
    "convert_to_host_path",
    "get_sandbox_path",
    "get_upload_file_path",
    "is_url_path",
    "locate",
    "sanitize_chat_key_for_path",
]

_UPLOADS = PurePosixPath(layout.SANDBOX_UPLOADS)
_SHARED = PurePosixPath(layout.SANDBOX_SHARED)
AREA_NAMES = (_UPLOADS.name, _SHARED.name)


class PathLocation(Enum):
    """The two areas that sandboxed code and plugins share."""

    #: Files of the chat; in the sandbox read-only at ``/app/uploads``.
    UPLOADS = "uploads"
    #: Files of the sandbox; in the sandbox writable at ``/app/shared``.
    SHARED = "shared"


def locate(
    sandbox_path: str | PurePosixPath, area_of: Callable[[PathLocation], Path] | None = None
) -> tuple[PathLocation, PurePosixPath]:
    """Return the area of a sandbox path and the path below it.

    A relative path starts in the working directory of the code, ``/app/shared``, where sandboxes make links
    ``shared`` and ``uploads``: ``chart.png`` and ``shared/chart.png`` are one file.

    Args:
        area_of: returns the host directory of an area. With it, those links count in absolute paths too:
            what ``os.path.abspath("uploads/a.csv")`` returns inside is a file of the uploads. Without it,
            the path is taken as it is.

    Raises:
        InvalidValueError: the path is in neither area, contains ``..``, a NUL or a lone surrogate.
    """
    text = str(sandbox_path)
    if "\0" in text:
        raise InvalidValueError(f"sandbox path {text!r} contains a NUL character")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise InvalidValueError(f"sandbox path {text!r} contains a lone surrogate") from exc
    # POSIX allows a leading "//" a meaning of its own; here it is equivalent to "/".
    path = PurePosixPath("/" + text.lstrip("/") if text.startswith("/") else text)
    if ".." in path.parts:
        raise InvalidValueError(f"sandbox path {text!r} contains '..'; write it without")
    if not path.is_absolute() and path.parts:
        base = PurePosixPath(layout.SANDBOX_ROOT) if path.parts[0] in AREA_NAMES else _SHARED
        path = base / path
    for location, base in ((PathLocation.UPLOADS, _UPLOADS), (PathLocation.SHARED, _SHARED)):
        if path.is_relative_to(base):
            return _without_links(location, path.relative_to(base), area_of)
    raise InvalidValueError(
        f"sandbox path {text!r} lies in neither {layout.SANDBOX_UPLOADS} nor {layout.SANDBOX_SHARED}"
    )


def absolute_sandbox_path(sandbox_path: str) -> PurePosixPath:
    """Return the absolute form of a path as sandboxed code may write it; errors as in :func:`locate`."""
    location, relative = locate(sandbox_path)
    return PurePosixPath(layout.SANDBOX_ROOT, location.value, relative)


def _without_links(
    location: PathLocation, relative: PurePosixPath, area_of: Callable[[PathLocation], Path] | None
) -> tuple[PathLocation, PurePosixPath]:
    """Follow the links ``shared`` and ``uploads`` at the top of the shared area, by their names only."""
    while (
        area_of is not None
        and location is PathLocation.SHARED
        and relative.parts
        and relative.parts[0] in AREA_NAMES
        and (area_of(location) / relative.parts[0]).is_symlink()
    ):
        location, relative = PathLocation(relative.parts[0]), PurePosixPath(*relative.parts[1:])
    return location, relative


def convert_to_host_path(
    sandbox_path: Path | str,
    chat_key: str,
    container_key: str | None = None,
    uploads_dir: Path | None = None,
    shared_dir: Path | None = None,
) -> Path:
    """Return the host path of a sandbox path; whether a file exists there is not checked.

    Sandboxed code can replace files of the shared area at any time. In a call, a file there is
    therefore accessed through a private copy of the same name: what the plugin writes to it is
    copied to the area when the call ends (see ``nekro_agent.files.staging``).

    Args:
        chat_key: chat whose uploads are used.
        container_key: container whose shared area is used; needed only for ``/app/shared``.
        uploads_dir: parent of the chats' upload directories; None means the runtime's.
        shared_dir: parent of the sandboxes' shared directories; None means the runtime's.

    Raises:
        InvalidValueError: the path is in neither area, contains ``..``, passes through a link, or
            is a shared path without a container key.
    """

    def area_of(location: PathLocation) -> Path:
        if location is PathLocation.UPLOADS:
            return uploads_dir / layout.encode_key(chat_key) if uploads_dir else _uploads(chat_key)
        if container_key:
            return shared_dir / layout.encode_key(container_key) if shared_dir else _shared(container_key)
        raise InvalidValueError(f"{sandbox_path}: a shared path needs container_key=_ctx.container_key")

    location, relative = locate(PurePosixPath(sandbox_path), area_of)
    base = area_of(location)
    if base.is_dir():
        refuse_links(base, relative)
        if location is PathLocation.SHARED and shared_dir is None:
            private = staging.private_path(base, relative)
            return base / relative if private is None else private
    return base / relative


def _uploads(chat_key: str) -> Path:
    if runtime.is_bound():
        return runtime.current().areas.uploads_dir(chat_key)
    return layout.uploads_dir(runtime.data_root(), chat_key)


def _shared(container_key: str) -> Path:
    if runtime.is_bound():
        return runtime.current().areas.shared_dir(container_key)
    return layout.shared_dir(runtime.data_root(), container_key)


def convert_filename_to_access_path(filename: str | Path, chat_key: str) -> Path:
    """Return the host path of a file of that name in the chat's uploads; directories are dropped."""
    return _uploads(chat_key) / _name(filename)


def get_upload_file_path(chat_key: str, filename: str | Path) -> Path:
    """Return the host path of a file of that name in the chat's uploads."""
    return convert_filename_to_access_path(filename, chat_key)


def convert_filename_to_sandbox_upload_path(filename: str | Path) -> Path:
    """Return ``/app/uploads/<name>``; directories are dropped."""
    return Path(_UPLOADS / _name(filename))


def convert_filename_to_sandbox_shared_path(filename: str | Path) -> Path:
    """Return ``/app/shared/<name>``; directories are dropped."""
    return Path(_SHARED / _name(filename))


def convert_filepath_to_sandbox_upload_path(filepath: str | Path) -> Path:
    """Return ``/app/uploads/<path>``; directories are kept."""
    return Path(_UPLOADS / _relative(filepath))


def convert_filepath_to_sandbox_shared_path(filepath: str | Path) -> Path:
    """Return ``/app/shared/<path>``; directories are kept."""
    return Path(_SHARED / _relative(filepath))


def convert_filename_to_container_path(filename: str | Path) -> Path:
    """Return ``/app/uploads/<name>``; directories are dropped."""
    return convert_filename_to_sandbox_upload_path(filename)


#: Alias of the same function.
get_sandbox_path = convert_filename_to_container_path


def convert_to_container_path(path: Path | str) -> Path:
    """Return ``/app/uploads/<name>`` for a host path; only its name is used."""
    return convert_filename_to_sandbox_upload_path(path)


def is_url_path(path: str) -> bool:
    """Whether ``path`` starts with ``http://`` or ``https://``."""
    return isinstance(path, str) and path.startswith(("http://", "https://"))


def sanitize_chat_key_for_path(chat_key: str) -> str:
    """Return the directory name of a chat."""
    return layout.encode_key(chat_key)


def _name(filename: str | Path) -> str:
    name = PurePosixPath(filename).name
    if not name or name == ".." or "\0" in name:
        raise InvalidValueError(f"{str(filename)!r} has no file name")
    return name


def _relative(filepath: str | Path) -> PurePosixPath:
    path = PurePosixPath(str(filepath).lstrip("/"))
    if not path.parts or ".." in path.parts or "\0" in str(path):
        raise InvalidValueError(f"{str(filepath)!r} is not a path below an area")
    return path
