"""Messages that people post, with their turns, and turns that run again in a new chat.

Parts of messages are stored in the chat's uploads. The chat of a turn that runs again has the history that
the turn had.
"""

from __future__ import annotations

import asyncio
import dataclasses
import mimetypes
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from nekro.agent.multimodal import image_data
from nekro.app.chats.attachments import Attachment, FileIds, attachments_of
from nekro.app.chats.files import ChatFiles
from nekro.app.chats.writer import message_bytes
from nekro.app.rounds.intake import AlsoWrite, Receipt
from nekro.app.services import Services
from nekro.operations.actor import Actor, Identity, RefusedError, Scope, key_reused
from nekro.operations.admission import KeyFiles, require_budget
from nekro.operations.chats import message_answer
from nekro.operations.turns import first_round
from nekro_agent import layout
from nekro_agent.errors import NotFoundError, UsageError
from nekro_agent.files.names import HEAD_BYTES, suffix_of
from nekro_agent.ports import ChatInfo, IncomingMessage, MessageKind
from nekro_client.models import (
    MessageBody,
    NewFilePart,
    NewImagePart,
    NewPart,
    NewTextPart,
    PostedMessage,
    ReplayedTurn,
    ReplayTurnBody,
)
from storage.repositories.messages import COPY_PREFIX, Message
from storage.repositories.rounds import Round
from storage.states import StoredKind, TriggerKind
from storage.transaction import Transaction

if TYPE_CHECKING:
    from nekro.app.rounds.continuations import Continuation

__all__ = [
    "MOST_PARTS",
    "PostedContent",
    "incoming_message",
    "post_message",
    "posted_message",
    "replay_turn",
    "sender_of",
    "stored_content",
]


#: Most parts of one message.
MOST_PARTS: Final = 64
#: Messages of the history that the chat of a turn that runs again gets: more than any prompt shows.
_MOST_MESSAGES: Final = 500


@dataclass(frozen=True, kw_only=True)
class PostedContent:
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
) -> PostedContent:
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
    return PostedContent(text="\n".join(texts), segments=[] if is_plain else segments)


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
            return await uploads.add(found.name, file.file)
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


async def incoming_message(
    services: Services,
    identity: Identity,
    chat_key: str,
    body: MessageBody,
    *,
    parts: Sequence[NewPart],
    files: Sequence[Attachment],
) -> IncomingMessage:
    """Return the message of a body, whose files are stored.

    Args:
        parts: text and parts of the body, in order.
        files: of the message; they follow the parts.

    Raises:
        RefusedError: as from ``stored_content`` and ``sender_of``.
    """
    user_id = sender_of(identity, body.user_id)
    content = await stored_content(services, identity, chat_key, parts, files=files)
    return IncomingMessage(
        chat_key=chat_key,
        text=content.text,
        user_id=user_id,
        user_name=body.user_name or user_id,
        is_tome=body.to_agent,
        content_data=content.segments,
    )


def sender_of(identity: Identity, stated: str | None) -> str:
    """Return the user that a message is from.

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
    also: AlsoWrite | None = None,
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
        also=also,
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


async def replay_turn(actor: Actor, turn_id: str, body: ReplayTurnBody) -> ReplayedTurn:
    """Run a turn again in a new chat, which gets the history up to the message that caused the turn.

    The old chat stays as it is. Messages, their files, persona and model group are copied; what plugins keep
    for the chat, and `/app/shared`, are not. Methods run as always, also those with effects elsewhere.

    With `call_id`, the turn goes on from that call: its programs run again, and the calls before it are
    answered as before, without a request to the model. Calls from that one on are made in the new chat, and
    need approval as any. `/app/shared` has what the programs themselves write.
    """
    once, call_id = actor.once, body.call_id
    first = await first_round(actor, turn_id, Scope.READ)
    kind = "replay" if call_id is None else "from"
    chat_key = body.chat_key or f"{first.chat_key}-{kind}-{once.id[:8]}"
    actor.identity.require(Scope.POST, chat_key=chat_key)

    async def work() -> ReplayedTurn:
        services, found = actor.services, None
        if call_id is not None:
            found = await services.continuations.prepare(turn_id, call_id)
        return await _replay(
            services,
            actor.identity,
            first,
            found,
            chat_key=chat_key,
            once=once.name,
            is_again=once.is_repetition,
        )

    return await once.run(ReplayedTurn, work)


async def _replay(
    services: Services,
    identity: Identity,
    first: Round,
    continuation: Continuation | None,
    *,
    chat_key: str,
    once: str | None,
    is_again: bool,
) -> ReplayedTurn:
    """Copy a chat up to the message that caused a turn, and post that message in the copy.

    The old chat stays as it is. The new one gets messages and their files in the uploads, persona and model
    group; what plugins keep for the old chat, and `/app/shared`, are not copied.

    Args:
        first: the turn's first round.
        continuation: what the new turn repeats; None: nothing.
        chat_key: the new chat.
        once: names the message; see ``post_message``.
        is_again: whether an earlier execution of the same request may have made the chat.

    Raises:
        RefusedError: 409, no person's message caused the turn, or the chat exists; others as for
            ``post_message``.
        UploadQuotaError, StorageQuotaError: the files or messages do not fit.
    """
    async with services.database.read() as transaction:
        cause = await _cause(transaction, first) if continuation is None else continuation.cause
        history = await transaction.messages.before(cause, limit=_MOST_MESSAGES)
        old = await transaction.chats.get(first.chat_key)
        is_taken = await _is_taken(transaction, chat_key)
    # Before the chat is made, because the key may not act for every user.
    user_id = sender_of(identity, cause.sender_id)
    if is_taken and not is_again:  # the same request may have posted there
        raise RefusedError(
            HTTPStatus.CONFLICT, "chat_exists", f"there is a chat {chat_key!r} already; name a new one"
        )
    new = await _made(services, old, chat_key)
    uploads = KeyFiles(services, identity, new.chat_key)
    said = [] if continuation is None else continuation.said
    files = await _copied_files(services.files_of(old), uploads, [*history, cause, *said])

    async def copy(transaction: Transaction, messages: Sequence[Message]) -> None:
        copies = [
            dataclasses.replace(one, chat_key=chat_key, data=_data(one.data, files)) for one in messages
        ]
        await transaction.messages.copy(copies)
        size = sum(message_bytes(one) for one in copies)
        transaction.stored_bytes.add(identity.account_id, StoredKind.MESSAGES, size)

    async def go_on(transaction: Transaction, message: Message) -> None:
        await copy(transaction, said)
        if continuation is not None and message.turn_id is not None:
            await continuation.write(transaction, await transaction.rounds.get(message.turn_id))

    async with services.database.begin() as transaction:
        await copy(transaction, history)
    data = _data(cause.data, files) or {}

    async def message() -> IncomingMessage:
        return IncomingMessage(
            chat_key=chat_key,
            text=cause.text,
            user_id=user_id,
            user_name=cause.sender_name or user_id,
            content_data=data.get("content_data") or (),
        )

    receipt = await post_message(services, identity, chat_key, message, once=once, also=go_on)
    posted = posted_message(services.file_ids, receipt)
    return ReplayedTurn(chat_key=chat_key, message=posted.message, turn_id=posted.turn_id)


async def _cause(transaction: Transaction, first: Round) -> Message:
    is_by_message = first.trigger_kind is TriggerKind.MESSAGE
    cause = await transaction.messages.find(first.trigger_id) if is_by_message else None
    if cause is None or cause.kind is not MessageKind.USER or cause.chat_key != first.chat_key:
        raise RefusedError(
            HTTPStatus.CONFLICT,
            "turn_not_replayable",
            "only a turn that a person's message caused can run again, while that message is kept",
        )
    return cause


async def _is_taken(transaction: Transaction, chat_key: str) -> bool:
    """Whether something happened in a chat; copies that a failed request left do not count."""
    if (await transaction.events.newest_numbers([chat_key])).get(chat_key):
        return True
    newest = await transaction.messages.newest(chat_key, limit=1, with_past=True)
    return any(not (message.once_key or "").startswith(COPY_PREFIX) for message in newest)


async def _made(services: Services, old: ChatInfo, chat_key: str) -> ChatInfo:
    async with services.database.begin() as transaction:
        new = await transaction.chats.ensure(chat_key, channel_type=old.channel_type)
        await transaction.chats.copy_choices(old.chat_key, chat_key)
        return new


async def _copied_files(old: ChatFiles, new: KeyFiles, messages: Sequence[Message]) -> dict[str, Attachment]:
    """Copy the uploads of messages under their names, except missing ones; returns the copies by path."""
    copied: dict[str, Attachment] = {}
    for path in {one.path for message in messages for one in attachments_of(message.data)}:
        directory, _, name = path.rpartition("/")
        if directory != layout.SANDBOX_UPLOADS:
            continue
        try:
            with ExitStack() as opened:
                file = await asyncio.to_thread(opened.enter_context, old.open(path))
                copied[path] = await new.add(name, file.file)
        except (UsageError, NotFoundError):
            continue
    return copied


def _data(data: Mapping[str, Any] | None, files: Mapping[str, Attachment]) -> dict[str, Any] | None:
    """Return the data of a message with the facts of the copied files."""
    if data is None:
        return None
    found = dict(data)
    if isinstance(found.get("content_data"), list):
        found["content_data"] = [_segment(segment, files) for segment in found["content_data"]]
    copy = files.get(str(found.get("file_path")))
    if copy is not None:
        found |= {"file_path": copy.path, "modified_ns": copy.modified_ns}
    return found


def _segment(segment: object, files: Mapping[str, Attachment]) -> object:
    if not isinstance(segment, Mapping):
        return segment
    copy = files.get(f"{layout.SANDBOX_UPLOADS}/{segment.get('file_name')}")
    if copy is None:
        return segment
    name = copy.path.rpartition("/")[2]
    return {**segment, "file_name": name, "modified_ns": copy.modified_ns}
