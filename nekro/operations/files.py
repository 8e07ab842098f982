"""Files of chats: listed, stored, opened and removed.

The path of a file comes from an id that a gateway made (``nekro.app.chats.attachments``); files are opened
below the chat's areas without following links, because sandboxed code can plant some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, TypeVar

from nekro.app.chats.attachments import Attachment, FileRef
from nekro.app.chats.files import ChatFile, ChatFiles, OpenFile
from nekro.operations.actor import Actor, RefusedError, Scope
from nekro.operations.admission import KeyFiles, file_removed
from nekro.operations.chats import file_info, require_chat
from nekro.operations.pages import Param
from nekro_agent.errors import NotFoundError, UsageError
from nekro_agent.files.areas import safe_basename
from nekro_agent.files.names import HEAD_BYTES
from nekro_agent.tools.path_convertor import PathLocation
from nekro_client.models import FileInfo, Page

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "get_file_info",
    "list_files",
    "open_file",
    "put_file",
    "remove_file",
    "require_upload",
]

T = TypeVar("T")


async def list_files(
    actor: Actor,
    chat_key: str,
    *,
    area: Literal["uploads", "shared"] | None = None,
    cursor: Annotated[str | None, Param(max_length=8192)] = None,
    limit: Annotated[int, Param(ge=1, le=1000)] = 100,
) -> Page[FileInfo]:
    """List the files of a chat in the order of their paths; ``area``: only those of one area."""
    actor.identity.require(Scope.READ, chat_key=chat_key)
    files = await _files_of(actor.services, chat_key)
    ids = actor.services.file_ids
    locations = [PathLocation(area)] if area else []
    after = ids.read(chat_key, cursor).path if cursor else ""

    def page() -> Page[FileInfo]:
        found = (file for file in files.list(*locations) if file.path > after)
        first = sorted(found, key=lambda file: file.path)[: limit + 1]
        items = [file_info(ids, chat_key, file) for file in _listed(files, first[:limit])]
        return Page(items=items, next_cursor=items[-1].id if len(first) > limit else None)

    return await asyncio.to_thread(page)


async def get_file_info(
    actor: Actor,
    chat_key: str,
    path: Annotated[str, Param(max_length=8192, description="as sandboxed code may write it")],
) -> FileInfo:
    """Return the file of a path."""
    actor.identity.require(Scope.READ, chat_key=chat_key)
    files = await _files_of(actor.services, chat_key)
    (found,) = await asyncio.to_thread(lambda: _listed(files, [files.find(path)]))
    return file_info(actor.services.file_ids, chat_key, found)


def require_upload(actor: Actor, chat_key: str, name: str, *, path: str | None = None) -> None:
    """Return if the actor may store a file with this name; for the time before its content is read.

    Args:
        path: as for ``put_file``.

    Raises:
        RefusedError: 403, 404, the key may not post there.
        UsageError: the name is not plain.
    """
    actor.identity.require(Scope.POST, chat_key=chat_key)
    if path is not None:
        actor.identity.require(Scope.ADMIN)
    if safe_basename(name) != name or name.startswith("."):
        raise UsageError(f"{name!r} is not a plain file name")


async def put_file(
    actor: Actor,
    chat_key: str,
    name: str,
    content: BinaryIO,
    *,
    path: str | None = None,
    replaces: bool = False,
) -> FileInfo:
    """Store a file; the same content again has no effect.

    Args:
        path: where to store it, as for ``ChatFiles.put``; None: in the uploads.
        replaces: whether it replaces a file of its name, if the key has the scope ``admin``. A ``path`` does.

    Raises:
        RefusedError, UsageError: as from ``require_upload``; the path is not acceptable.
        NotFoundError: the chat does not exist, and a file may be replaced in it.
        ConflictError: another file has the name.
        UploadQuotaError, StorageQuotaError: the uploads, or the quota of the key, have no space for it.
    """
    require_upload(actor, chat_key, name, path=path)
    files = KeyFiles(actor.services, actor.identity, chat_key)
    if path is not None or (replaces and Scope.ADMIN in actor.identity.scopes):
        await _files_of(actor.services, chat_key)
        stored = await files.put(name, content, path)
    else:
        stored = await files.add(name, content, numbers=False)
    return file_info(actor.services.file_ids, chat_key, stored)


async def remove_file(actor: Actor, chat_key: str, file_id: str) -> None:
    """Remove a file. Messages keep its name.

    Raises:
        NotFoundError: the chat or the file does not exist.
        RefusedError: 403, 404, the key may not post there; 410, the file was replaced by another.
    """
    actor.identity.require(Scope.POST, chat_key=chat_key)
    ref = actor.services.file_ids.read(chat_key, file_id)
    files = await _files_of(actor.services, chat_key)

    def remove() -> None:
        _refuse_other_version(ref, files.find(ref.path))
        files.remove(ref.path)

    await _found(remove)
    await file_removed(actor.services, chat_key, ref.path)


async def open_file(
    services: Services, chat_key: str, ref: FileRef, opened: ExitStack
) -> tuple[OpenFile, bytes]:
    """Open a file of a chat for a reader whose right to it is known.

    Args:
        opened: closes it.

    Returns:
        The file, and its first ``HEAD_BYTES`` bytes, which have been read.

    Raises:
        NotFoundError: the chat or the file does not exist.
        RefusedError: 410, the content has changed since the id was made.
    """
    files = await _files_of(services, chat_key)

    def open_() -> tuple[OpenFile, bytes]:
        file = opened.enter_context(files.open(ref.path))
        _refuse_other_version(ref, file)
        return file, file.file.read(HEAD_BYTES)

    return await _found(open_)


async def _files_of(services: Services, chat_key: str) -> ChatFiles:
    async with services.database.read() as transaction:
        chat = await require_chat(transaction, chat_key)
    return services.files_of(chat)


def _refuse_other_version(ref: FileRef, file: ChatFile) -> None:
    if ref.modified_ns not in (None, file.modified_ns):
        raise RefusedError(HTTPStatus.GONE, "file_changed", "the file was replaced; list the files again")


async def _found(work: Callable[[], T]) -> T:
    """Do something with a file on a thread; a file that cannot be opened any more does not exist."""
    try:
        return await asyncio.to_thread(work)
    except (UsageError, NotFoundError) as exc:
        raise NotFoundError("the chat has no such file") from exc


def _listed(files: ChatFiles, found: Sequence[ChatFile]) -> list[Attachment]:
    return [
        Attachment(
            kind="file",
            path=file.path,
            name=file.path.rpartition("/")[2],
            media_type=media_type,
            size_bytes=file.size_bytes,
            modified_ns=file.modified_ns,
        )
        for file, media_type in zip(found, files.types_of(found), strict=True)
    ]
