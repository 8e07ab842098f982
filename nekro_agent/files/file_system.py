"""``_ctx.fs``: exchanges files between plugins and sandboxed code."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import mimetypes
import urllib.parse
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from nekro_agent import layout, runtime
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import staging
from nekro_agent.files.areas import (
    OwnFile,
    copy_in,
    copy_out,
    exists,
    find_file,
    refuse_links,
    safe_basename,
    shown,
)
from nekro_agent.files.names import HEAD_BYTES, suffix_of
from nekro_agent.files.uploads import UploadArea
from nekro_agent.tools.path_convertor import PathLocation, convert_to_host_path, is_url_path, locate
from nekro_agent.tools.task_groups import in_thread

if TYPE_CHECKING:
    from nekro_agent.downloads.download import Download

__all__ = ["FileSystem", "decode_data_url", "is_data_url"]

#: The reason why a file that a text names is refused.
_WHOSE = (
    "it is neither a file of this chat (/app/uploads, /app/shared) nor of this plugin's data directory, "
    "nor did this call make it by tempfile"
)


class FileSystem:
    """The two areas that a chat's sandboxed code and its plugins share.

    ``/app/uploads`` is per chat and read-only in the sandbox; ``/app/shared`` is writable there.

    If the files are in a store, the first request of a call for a path brings the area to this host, and what
    the call has changed is committed at its end. Code outside of calls has the version of the last second;
    its changes are committed within seconds, for ten minutes after its last request for a path.
    """

    def __init__(self, chat_key: str, container_key: str, *, plugin_key: str | None = None) -> None:
        self.chat_key = chat_key
        self.container_key = container_key
        self._plugin_key = plugin_key

    @property
    def shared_path(self) -> Path:
        """Absolute host directory behind ``/app/shared``; it exists. Sandboxed code can write there."""
        return runtime.current().areas.shared_dir(self.container_key)

    @property
    def upload_path(self) -> Path:
        """Absolute host directory behind ``/app/uploads``; it exists."""
        return runtime.current().areas.uploads_dir(self.chat_key)

    def get_file(self, path: str | Path) -> Path:
        """Return a host path for a sandbox path (``/app/shared/…``, ``/app/uploads/…`` or relative).

        For a file in the shared area this is the path of a private copy, with the same name and for
        the duration of the call, because sandboxed code may replace files there at any time.
        What the plugin writes to it, or beside it, is copied to the area when the call ends, or
        earlier when it is forwarded or sent. A directory maps to the live area; outside of a call,
        a path that does not exist does too.

        Raises:
            InvalidValueError: the path is in neither area, contains ``..`` or passes through a
                link.
        """
        location, relative = locate(PurePosixPath(path), self._area)
        mapped = convert_to_host_path(Path(path), self.chat_key, self.container_key)
        is_live = mapped.is_relative_to(self.shared_path)
        if location is PathLocation.UPLOADS or not is_live or not mapped.is_file():
            return mapped
        copy = staging.new_directory() / relative.name
        copy_out(self.shared_path, relative, copy)
        return copy

    def forward_file(self, host_path: str | Path) -> str:
        """Return the sandbox path of a host file that is already in one of the two areas.

        Raises:
            InvalidValueError: it is elsewhere (:meth:`mixed_forward_file` copies such files).
        """
        path = Path(host_path)
        mapped = self._as_sandbox_path(path)
        if mapped is None:
            raise InvalidValueError(
                f"{path.name!r} lies in neither area of this chat; use await _ctx.fs.mixed_forward_file(…)"
            )
        return mapped

    async def mixed_forward_file(self, file: str | Path | bytes, file_name: str = "") -> str:
        """Make a file or content readable for sandboxed code and return its sandbox path.

        Args:
            file: an ``http(s)://`` URL, a ``data:`` URL or bytes (all are stored in the uploads), a
                sandbox path, or a host path: one inside an area is mapped, any other file is copied
                to the shared area.
            file_name: name of the file in the area, reduced to its basename; ``""`` chooses one, of a URL
                the name that the server states.

        Raises:
            InvalidValueError: the file does not exist, the path or name is not acceptable, or a
                ``str`` names a host file that does not belong to this plugin or chat.
            DownloadError: the URL could not be fetched.
            UploadQuotaError: the chat's uploads have no space for it.
            TypeError: ``file`` has another type.
        """
        await self._begin()
        name = safe_basename(file_name) if file_name else ""
        if isinstance(file, bytes | bytearray | memoryview):
            return await self._deliver_upload(bytes(file), name)
        if isinstance(file, Path):
            return await self._forward_path(file, name)
        if not isinstance(file, str):
            raise TypeError(f"cannot forward {type(file).__name__}; pass a URL, a path or bytes")
        if is_url_path(file):
            return await self._download(file, name)
        if is_data_url(file):
            content, suffix = decode_data_url(file)
            return await self._deliver_upload(content, name, suffix=suffix)
        return await self._forward_text_path(file, name)

    async def bring_to_uploads(self, file: str, file_name: str = "") -> str:
        """Copy a file to the chat's uploads, which hold the files of messages; return its sandbox path.

        A file there that has its name is not replaced, because an earlier message may show it.

        Args:
            file: a URL, a sandbox path, or a host path of this plugin or chat.
            file_name: name to store under; ``""`` keeps the file's own name.

        Raises:
            InvalidValueError: the file does not exist or belongs to another plugin, chat or the system.
            DownloadError: the URL could not be fetched.
            UploadQuotaError: the chat's uploads have no space for it.
        """
        await self._begin()
        name = safe_basename(file_name) if file_name else ""
        if is_url_path(file) or is_data_url(file):
            return await self.mixed_forward_file(file, name)
        sandbox_path = self._existing_sandbox_path(file) or self._as_sandbox_path(Path(file))
        found = None if sandbox_path else self._found(Path(file))
        if found is not None:
            sandbox_path = self._as_sandbox_path(found.path)
        elif sandbox_path is None:
            raise InvalidValueError(
                f"cannot send {shown(file)}: {_WHOSE}; "
                "pass its content or a pathlib.Path to _ctx.fs.mixed_forward_file, and send what that returns"
            )
        target = name or safe_basename(Path(file).name)
        if sandbox_path is None and found is not None:
            stored = await asyncio.to_thread(_upload, self.upload_path, target, found.open())
            return f"{layout.SANDBOX_UPLOADS}/{stored}"
        path = self.get_file(sandbox_path or file)
        if not path.is_file():
            raise InvalidValueError(f"cannot send {shown(file)}: it is a directory or does not exist")
        if sandbox_path and sandbox_path.startswith(layout.SANDBOX_UPLOADS + "/"):
            return sandbox_path
        stored = await asyncio.to_thread(_upload, self.upload_path, target, path.open("rb"))
        return f"{layout.SANDBOX_UPLOADS}/{stored}"

    async def _begin(self) -> None:
        """Let the areas have what this call wrote, and this host the areas."""
        areas = runtime.current().areas
        if areas.is_synced:  # else a request for a path below would bring them, and block the event loop
            await areas.bring(chat_key=self.chat_key, container_key=self.container_key)
        await staging.settle()

    async def _deliver_upload(self, content: bytes, name: str, *, suffix: str = "") -> str:
        suffix = suffix_of(content[:HEAD_BYTES]) or suffix
        target = name or hashlib.md5(content, usedforsecurity=False).hexdigest() + suffix
        await asyncio.to_thread(UploadArea(self.upload_path).put, target, content)
        return f"{layout.SANDBOX_UPLOADS}/{target}"

    async def _download(self, url: str, name: str) -> str:
        # Imported here: it imports httpcore, and most processes download nothing.
        from nekro_agent.downloads.download import fetch

        area = UploadArea(self.upload_path)
        unnamed = area.new_download()
        try:
            result = await fetch(url, unnamed)
            if not name and result.file_name:
                size, sha256 = result.size_bytes, result.sha256
                name = await in_thread(
                    lambda: area.finish_as_new(unnamed, str(result.file_name), size=size, sha256=sha256)
                )
                return f"{layout.SANDBOX_UPLOADS}/{name}"
            if not name:
                suffix = await in_thread(_suffix_of, url, result)
                name = hashlib.md5(url.encode(), usedforsecurity=False).hexdigest() + suffix
            await in_thread(area.finish, unnamed, name)
        finally:
            unnamed.unlink(missing_ok=True)
        return f"{layout.SANDBOX_UPLOADS}/{name}"

    async def _forward_text_path(self, text: str, name: str) -> str:
        sandbox_path = self._existing_sandbox_path(text)
        if sandbox_path is not None:
            return sandbox_path
        path = Path(text)
        found = self._found(path)
        if found is None:
            raise InvalidValueError(
                f"cannot forward {shown(text)}: {_WHOSE}; "
                "pass a pathlib.Path to forward another file of the host on purpose"
            )
        for inside in (path, found.path):
            if self._as_sandbox_path(inside) is not None:
                return await self._forward_path(inside, name)
        target = name or safe_basename(path.name)
        await asyncio.to_thread(_copy_found, self.shared_path, target, found)
        return f"{layout.SANDBOX_SHARED}/{target}"

    async def _forward_path(self, path: Path, name: str) -> str:
        mapped = self._as_sandbox_path(path)
        if mapped is not None and name in ("", PurePosixPath(mapped).name):
            return mapped
        target = name or safe_basename(path.name)
        found = None if mapped is not None else self._found(path)
        if found is not None and found.directory == self.shared_path.resolve():
            # Reached by a link: the file there may be replaced at any time.
            await asyncio.to_thread(_copy_found, self.shared_path, target, found)
            return f"{layout.SANDBOX_SHARED}/{target}"
        if mapped is not None:
            path = self.get_file(mapped)
        if not path.is_file():
            raise InvalidValueError(f"{path.name!r} does not exist or is not a regular file")
        if mapped is None and found is None and self._is_foreign(path):
            raise InvalidValueError(f"{path.name!r} belongs to another plugin, chat or to the system itself")
        await asyncio.to_thread(copy_in, self.shared_path, target, path)
        return f"{layout.SANDBOX_SHARED}/{target}"

    @contextlib.contextmanager
    def open_named(self, text: str) -> Iterator[BinaryIO]:
        """Open the file that a text names for reading: by a sandbox path, or a host path of this call.

        Raises:
            InvalidValueError: it is not a file of this call.
            FileNotFoundError: it no longer exists.
        """
        sandbox_path = self._existing_sandbox_path(text)
        found = self._found(self.get_file(sandbox_path) if sandbox_path else Path(text))
        if found is None:
            raise InvalidValueError(f"cannot read {shown(text)}: {_WHOSE}; pass a pathlib.Path to read it")
        with found.open() as file:
            yield file

    def require_target(self, text: str) -> None:
        """Check that a text names a path where this call may write: in its areas or directories.

        Raises:
            InvalidValueError: it is elsewhere.
        """
        parent = Path(text).absolute().parent.resolve()
        own = [*self._own_directories(), *(path for path in staging.temporary_names() if path.is_dir())]
        is_temporary_file = Path(text).absolute() in staging.temporary_names()
        if not is_temporary_file and not any(parent.is_relative_to(each.resolve()) for each in own):
            raise InvalidValueError(
                f"cannot write to {shown(text)}: it lies in no directory of this chat or plugin; "
                "pass a pathlib.Path to write elsewhere on purpose"
            )

    def _existing_sandbox_path(self, text: str) -> str | None:
        try:
            location, relative = locate(text, self._area)
        except InvalidValueError:
            return None
        if not relative.parts or not exists(self._area(location), relative):
            return None
        return f"{layout.SANDBOX_ROOT}/{location.value}/{relative}"

    def _as_sandbox_path(self, path: Path) -> str | None:
        """Map a host path inside one of this chat's areas; None if it is elsewhere."""
        path = Path(path).absolute()
        if ".." in path.parts:
            return None
        private = staging.place_of(path)
        if private is not None and private[0] == self.shared_path:
            return f"{layout.SANDBOX_SHARED}/{private[1]}"
        for location in PathLocation:
            area = self._area(location)
            if not path.is_relative_to(area):
                area = area.resolve()
            if path.is_relative_to(area) and path != area:
                relative = PurePosixPath(path.relative_to(area))
                refuse_links(area, relative)
                return f"{layout.SANDBOX_ROOT}/{location.value}/{relative}"
        return None

    def _area(self, location: PathLocation) -> Path:
        return self.upload_path if location is PathLocation.UPLOADS else self.shared_path

    def _own_directories(self) -> list[Path]:
        own = [self.upload_path, self.shared_path, *staging.own_directories()]
        if self._plugin_key:
            own.append(runtime.current().areas.plugin_dir(self._plugin_key))
        return own

    def _found(self, path: Path) -> OwnFile | None:
        """Find the file of a path that a text, perhaps of the LLM, names; None if it is not this call's."""
        return find_file(path, directories=self._own_directories(), temporary=staging.temporary_names())

    def _is_foreign(self, path: Path) -> bool:
        """Whether a path is below the data root, but in no area that this call may read."""
        return path.resolve().is_relative_to(runtime.data_root().resolve())


def _upload(area: Path, name: str, source: AbstractContextManager[BinaryIO]) -> str:
    with source as file:
        return UploadArea(area).add(name, file)


def _copy_found(area: Path, name: str, found: OwnFile) -> None:
    """Copy a file into an area; refused if a link leads to the file."""
    with found.open() as file:
        copy_in(area, name, file)


def is_data_url(text: str) -> bool:
    """Whether a text is a ``data:`` URL."""
    return text.startswith("data:")


def decode_data_url(url: str) -> tuple[bytes, str]:
    """Return the content of a ``data:`` URL, and the suffix of its media type.

    Raises:
        InvalidValueError: the URL is not valid.
    """
    header, separator, payload = url.partition(",")
    media_type, *parameters = header.removeprefix("data:").split(";")
    if not separator:
        raise InvalidValueError("a data: URL needs a comma before its content")
    try:
        if "base64" in parameters:
            content = base64.b64decode(urllib.parse.unquote_to_bytes(payload), validate=True)
        else:
            content = urllib.parse.unquote_to_bytes(payload)
    except (binascii.Error, ValueError) as exc:
        raise InvalidValueError(f"the data: URL ({media_type or 'text/plain'}) is not valid base64") from exc
    return content, mimetypes.guess_extension(media_type or "text/plain") or ""


def _suffix_of(url: str, result: Download) -> str:
    suffix = PurePosixPath(urllib.parse.urlsplit(url).path).suffix
    if 1 < len(suffix) <= 12 and suffix[1:].isalnum():
        return suffix
    with result.path.open("rb") as file:
        found = suffix_of(file.read(HEAD_BYTES))
    return found or mimetypes.guess_extension((result.content_type or "").split(";")[0].strip()) or ""
