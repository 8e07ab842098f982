"""Messages that a command without a gateway posts, and files of chats, as the client's methods."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from nekro.operations.actor import Actor
    from nekro_agent.ports import IncomingMessage
    from nekro_client.models import FileInfo, NewPart, PostedMessage

__all__ = ["download_file", "send_message", "store_file", "upload_file"]


async def send_message(
    actor: Actor,
    chat_key: str,
    text: str | None = None,
    *,
    parts: Sequence[NewPart] = (),
    files: Sequence[Path | str] = (),
    stored: Sequence[FileInfo] = (),
    user_id: str | None = None,
    user_name: str | None = None,
    to_agent: bool = True,
) -> PostedMessage:
    """Post a person's message; for the arguments see ``AsyncChat.send``."""
    from nekro.operations import posting
    from nekro_client.models import MessageBody, NewFilePart, NewImagePart, NewTextPart

    services, identity = actor.services, actor.identity
    given: list[NewPart] = [] if text is None else [NewTextPart(text=text)]
    given += parts
    for one in stored:
        kind = NewImagePart if one.media_type.startswith("image/") else NewFilePart
        given.append(kind(file_id=one.id))

    async def message() -> IncomingMessage:
        area = services.files_of(await services.chat(chat_key))
        added = [await asyncio.to_thread(area.add_file, Path(path)) for path in files]
        body = MessageBody(user_id=user_id, user_name=user_name, to_agent=to_agent)
        return await posting.incoming_message(services, identity, chat_key, body, parts=given, files=added)

    receipt = await posting.post_message(services, identity, chat_key, message, once=None)
    return posting.posted_message(services.file_ids, receipt)


async def store_file(actor: Actor, chat_key: str, source: Path | str) -> FileInfo:
    """Store a file of this host in the chat's uploads; if another one has its name, under a new one."""
    from nekro.operations.chats import file_info

    services = actor.services
    area = services.files_of(await services.chat(chat_key))
    stored = await asyncio.to_thread(area.add_file, Path(source))
    return file_info(services.file_ids, chat_key, stored)


async def upload_file(
    actor: Actor,
    chat_key: str,
    source: Path,
    *,
    name: str | None = None,
    media_type: str | None = None,
    path: str | None = None,
    replace: bool = False,
) -> FileInfo:
    """Store a file of this host in either area of a chat; for the arguments see ``AsyncFiles.upload``."""
    from nekro.operations.files import put_file

    with source.open("rb") as file:
        return await put_file(actor, chat_key, name or source.name, file, path=path, replaces=replace)


async def download_file(actor: Actor, chat_key: str, file_id: str, target: Path | str | BinaryIO) -> int:
    """Write a file to a path or into a stream; returns its size in bytes.

    Raises:
        OSError: the target exists already, or cannot be written.
    """
    from nekro.operations.files import open_file

    with ExitStack() as opened:
        ref = actor.services.file_ids.read(chat_key, file_id)
        source, head = await open_file(actor.services, chat_key, ref, opened)
        if isinstance(target, (Path, str)):
            return await asyncio.to_thread(_copy_to, source.file, head, target)
        return await asyncio.to_thread(_copy, source.file, head, target)


def _copy_to(source: BinaryIO, head: bytes, path: Path | str) -> int:
    path = Path(path)
    with path.open("xb") as target:  # not through a link, and over no other file
        try:
            return _copy(source, head, target)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _copy(source: BinaryIO, head: bytes, target: BinaryIO) -> int:
    """Copy a file after its ``head``, which was read; returns its size."""
    target.write(head)
    shutil.copyfileobj(source, target)
    return source.tell()
