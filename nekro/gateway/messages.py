"""Messages that people post: their parts, which are stored in the chat's uploads, and their turns."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from nekro.agent.multimodal import image_data
from nekro.app.chats.attachments import Attachment, FileIds
from nekro.app.rounds.intake import Receipt
from nekro.app.services import Services
from nekro.gateway.idempotency import key_reused
from nekro.operations.actor import Identity, RefusedError, Scope
from nekro.operations.admission import KeyFiles, require_budget
from nekro.operations.messages import message_answer
from nekro_agent.errors import NotFoundError, UsageError
from nekro_agent.files.names import HEAD_BYTES, suffix_of
from nekro_agent.ports import IncomingMessage
from nekro_client.models import NewFilePart, NewImagePart, NewPart, NewTextPart, PostedMessage

__all__ = [
    "MOST_PARTS",
    "Content",
    "post_message",
    "posted_message",
    "sender_of",
    "stored_content",
]


#: Most parts of one message.
MOST_PARTS: Final = 64


@dataclass(frozen=True, kw_only=True)
class Content:
    """The content of a message to post."""

    #: Its text parts, joined by line feeds.
    text: str
    #: Segments for ``IncomingMessage.content_data``; empty if it is a text only.
    segments: Sequence[Mapping[str, Any]]


async def stored_content(
    services: Services,
    identity: Identity,
    chat_key: str,
    parts: Sequence[NewPart],
    *,
    files: Sequence[Attachment] = (),
) -> Content:
    """Store what parts carry in the chat's uploads, and return the content of their message.

    Args:
        identity: whose quota the files are on.
        files: files of the message that are stored already; they follow the parts.

    Raises:
        RefusedError: 422, a part is not valid or there are too many.
        StorageQuotaError, InvalidValueError, UploadQuotaError: as from ``KeyFiles.add``.
    """
    if len(parts) + len(files) > MOST_PARTS:
        raise _invalid(f"a message has at most {MOST_PARTS} parts")
    uploads = KeyFiles(services, identity, chat_key)
    texts: list[str] = []
    segments: list[Mapping[str, Any]] = []
    for part in parts:
        if isinstance(part, NewTextPart):
            texts.append(part.text)
            segments.append({"type": "text", "text": part.text})
        else:
            stored = await _stored(uploads, services.file_ids, chat_key, part)
            segments.append(stored.segment)
    segments += [file.segment for file in files]
    is_plain = len(texts) == len(segments)
    return Content(text="\n".join(texts), segments=[] if is_plain else segments)


async def _stored(
    uploads: KeyFiles, ids: FileIds, chat_key: str, part: NewImagePart | NewFilePart
) -> Attachment:
    if (part.file_id is None) == (part.data_url is None):
        raise _invalid(f"a part of type {part.type!r} needs file_id or data_url, and not both")
    if part.data_url is not None:
        stored = await uploads.add(*await asyncio.to_thread(_decoded, part.data_url, part.name, part.type))
    else:
        stored = await _uploaded(uploads, ids, chat_key, str(part.file_id), part.name)
    if part.type == "image" and stored.kind != "image":
        raise _invalid(f"{stored.name!r} is not a PNG, JPEG, GIF or WebP picture; post it as a file")
    return stored


async def _uploaded(
    uploads: KeyFiles, ids: FileIds, chat_key: str, file_id: str, name: str | None
) -> Attachment:
    area = await uploads.open()
    try:
        ref = ids.read(chat_key, file_id)
        found = await asyncio.to_thread(area.describe, ref.path, name=name)
    except (NotFoundError, UsageError) as exc:
        raise _invalid("file_id names no file of the chat") from exc
    if ref.modified_ns not in (None, found.modified_ns):
        raise _invalid("the file of file_id was replaced by another")
    if not ref.path.startswith("/app/uploads/"):
        # Sandboxed code can change its own files at any time.
        with ExitStack() as opened:
            file = await asyncio.to_thread(opened.enter_context, area.open(ref.path))
            return await uploads.add(found.name, file)
    return found


def _decoded(url: str, name: str | None, kind: str) -> tuple[str, bytes]:
    decoded = image_data(url) if url.startswith("data:") else None
    if decoded is None:
        raise _invalid("data_url is not a valid data URL (data:image/png;base64,…)")
    media_type, content = decoded
    suffix = suffix_of(content[:HEAD_BYTES]) or mimetypes.guess_extension(media_type) or ""
    return name or f"{kind}{suffix}", content


def _invalid(detail: str) -> RefusedError:
    return RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid_part", detail)


def sender_of(identity: Identity, stated: str | None) -> str:
    """Return the user in whose name a message is.

    Args:
        stated: the user that the request names; None if it names none.

    Raises:
        RefusedError: 403, the key acts for another user; 422, neither names one.
    """
    user_id = identity.user_for(stated)
    if user_id is None or not user_id.strip():
        raise RefusedError(
            HTTPStatus.UNPROCESSABLE_ENTITY, "user_missing", "name the user with user_id; the key has none"
        )
    return user_id


async def post_message(
    services: Services,
    identity: Identity,
    chat_key: str,
    make: Callable[[], Awaitable[IncomingMessage]],
    *,
    once: str | None,
    digest: bytes | None = None,
) -> Receipt | None:
    """Record a person's message and start a turn, on the key's budget; None if a plugin's hook blocked it.

    Args:
        make: returns the message; not called for a repetition, so its files are stored once.
        once: names the message (``Once.name``), so that a repetition finds it; None: it has no repetitions.
        digest: what a repetition must repeat (``Once.body_digest``); None: the caller has compared it.

    Raises:
        RefusedError: 403, 404, the key may not post there; 422, another message has this name; 429, the
            key's budget is used up.
        NekroError: the message was not recorded.
    """
    identity.require(Scope.POST, chat_key=chat_key)

    async def paid() -> IncomingMessage:
        await require_budget(services, identity)
        return await make()

    receipt = await services.intake.accept(
        paid,
        once_key=None if once is None else f"post:{once}",
        once_digest=None if once is None else digest,
        key_id=identity.key_id,
        issuer=identity.name,
    )
    if receipt is not None and receipt.is_repetition and digest is not None:
        known = receipt.message.once_digest  # None: a gateway of release 0.2 recorded it
        if known not in (None, digest):
            raise key_reused()
    return receipt


def posted_message(ids: FileIds, receipt: Receipt | None) -> PostedMessage:
    """Return the answer to the request that posted a message; None: a plugin's hook blocked it."""
    if receipt is None:
        return PostedMessage(message=None, turn_id=None)
    message = message_answer(receipt.message, ids, turn_id=receipt.turn_id)
    return PostedMessage(message=message, turn_id=receipt.turn_id)
