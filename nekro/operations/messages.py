"""Messages of chats, and how they and their files are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal
from urllib.parse import quote

from nekro.app.chats.attachments import Attachment, FileIds, attachments_of
from nekro.operations.actor import Actor, Scope
from nekro.operations.chats import require_chat
from nekro.operations.pages import Cursor, Limit, Param, number_of, page_of
from nekro_client.models import FileInfo, FilePart, ImagePart, Message, Page, Part, TextPart
from storage.repositories.messages import Message as MessageRow

__all__ = ["file_info", "list_messages", "message_answer", "message_parts"]


async def list_messages(
    actor: Actor,
    chat_key: str,
    limit: Limit = 50,
    cursor: Cursor = None,
    order: Literal["desc", "asc"] = "desc",
    with_past: Annotated[bool, Param()] = False,
) -> Page[Message]:
    """List messages, the newest first; ``with_past`` adds those from before the last reset.

    ``order=asc`` lists all messages, the oldest first, also those from before resets.
    """
    actor.identity.require(Scope.READ, chat_key=chat_key)
    position = None if cursor is None else number_of(cursor)
    async with actor.services.database.read() as transaction:
        await require_chat(transaction, chat_key)
        messages = transaction.messages
        if order == "asc":
            rows = await messages.after(chat_key, sequence=position or 0, limit=limit + 1)
        else:
            rows = await messages.newest(chat_key, limit=limit + 1, before=position, with_past=with_past)
            rows.reverse()
    ids = actor.services.file_ids
    return page_of(
        rows, limit=limit, answer=lambda row: message_answer(row, ids), position=lambda row: row.sequence
    )


def message_answer(row: MessageRow, ids: FileIds, *, turn_id: str | None = None) -> Message:
    """Return a message of a chat.

    Args:
        turn_id: the turn that it has just started; None: the recorded one.
    """
    return Message(
        id=row.id,
        sequence=row.sequence,
        chat_key=row.chat_key,
        kind=row.kind.value,
        sender_id=row.sender_id,
        sender_name=row.sender_name,
        text=row.text,
        parts=message_parts(ids, row),
        turn_id=turn_id or row.turn_id,
        call_id=row.call_id,
        round_id=row.round_id,
        plugin=row.plugin_key,
        data=row.data,
        created_at=row.created_at,
    )


def file_info(ids: FileIds, chat_key: str, file: Attachment) -> FileInfo:
    """Return the description of a file of a message."""
    file_id = ids.make(chat_key, file.path, modified_ns=file.modified_ns)
    return FileInfo(
        id=file_id,
        name=file.name,
        path=file.path,
        media_type=file.media_type,
        size_bytes=file.size_bytes or 0,
        sha256=file.sha256,
        created_at=_moment(file.modified_ns),
        url=f"/api/v1/chats/{quote(chat_key, safe='')}/files/{file_id}",
    )


def message_parts(ids: FileIds, row: MessageRow) -> list[Part]:
    """Return the parts of a recorded message, in order."""
    found: list[Part] = []
    segments = (row.data or {}).get("content_data")
    if not isinstance(segments, list) or not segments:
        segments = [{"type": "text", "text": row.text}] if row.text else []
    for segment in segments:
        if isinstance(segment, Mapping) and segment.get("type") == "text":
            found.append(TextPart(text=str(segment.get("text") or "")))
        elif isinstance(segment, Mapping):
            found += _file_parts(ids, row.chat_key, attachments_of({"content_data": [segment]}))
    data = {name: value for name, value in (row.data or {}).items() if name != "content_data"}
    return [*found, *_file_parts(ids, row.chat_key, attachments_of(data))]


def _file_parts(ids: FileIds, chat_key: str, files: Sequence[Attachment]) -> list[Part]:
    return [
        (ImagePart if file.kind == "image" else FilePart)(file=file_info(ids, chat_key, file))
        for file in files
    ]


def _moment(nanoseconds: int | None) -> datetime | None:
    return None if nanoseconds is None else datetime.fromtimestamp(nanoseconds / 1e9, UTC)
