"""Runs a turn again in a new chat, which has the history that the turn had."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, Final

from nekro.app.chats.attachments import Attachment, attachments_of
from nekro.app.chats.files import ChatFiles
from nekro.app.chats.writer import message_bytes
from nekro.app.services import Services
from nekro.gateway.messages import post_message, posted_message, sender_of
from nekro.operations.actor import Actor, Identity, RefusedError, Scope
from nekro.operations.admission import KeyFiles
from nekro.operations.turns import first_round
from nekro_agent import layout
from nekro_agent.errors import NotFoundError, UsageError
from nekro_agent.ports import ChatInfo, IncomingMessage, MessageKind
from nekro_client.models import ReplayedTurn, ReplayTurnBody
from storage.repositories.messages import COPY_PREFIX, Message
from storage.repositories.rounds import Round
from storage.states import StoredKind, TriggerKind
from storage.transaction import Transaction

__all__ = ["replay_turn"]

#: Messages of the history that the new chat gets: more than any prompt shows.
_MOST_MESSAGES: Final = 500


async def replay_turn(actor: Actor, turn_id: str, body: ReplayTurnBody) -> ReplayedTurn:
    """Run a turn again in a new chat, which gets the history up to the message that caused the turn.

    The old chat stays as it is. Messages, their files, persona and model group are copied; what plugins keep
    for the chat, and `/app/shared`, are not. Methods run as always, also those with effects elsewhere.
    """
    once = actor.once
    first = await first_round(actor, turn_id, Scope.READ)
    chat_key = body.chat_key or f"{first.chat_key}-replay-{once.id[:8]}"
    actor.identity.require(Scope.POST, chat_key=chat_key)

    async def work() -> ReplayedTurn:
        return await _replay(
            actor.services,
            actor.identity,
            first,
            chat_key=chat_key,
            once=once.name,
            is_again=once.is_repetition,
        )

    return await once.run(ReplayedTurn, work)


async def _replay(
    services: Services, identity: Identity, first: Round, *, chat_key: str, once: str | None, is_again: bool
) -> ReplayedTurn:
    """Copy a chat up to the message that caused a turn, and post that message in the copy.

    The old chat stays as it is. The new one gets messages and their files in the uploads, persona and model
    group; what plugins keep for the old chat, and `/app/shared`, are not copied.

    Args:
        first: the turn's first round.
        chat_key: the new chat.
        once: names the message; see ``post_message``.
        is_again: whether an earlier execution of the same request may have made the chat.

    Raises:
        RefusedError: 409, no person's message caused the turn, or the chat exists; others as for
            ``post_message``.
        UploadQuotaError, StorageQuotaError: the files or messages do not fit.
    """
    async with services.database.read() as transaction:
        cause = await _cause(transaction, first)
        history = await transaction.messages.before(cause, limit=_MOST_MESSAGES)
        old = await transaction.chats.get(first.chat_key)
        is_taken = await _is_taken(transaction, chat_key)
    # Before the chat is made: a user for whom the key may not act.
    user_id = sender_of(identity, cause.sender_id)
    if is_taken and not is_again:  # the same request may have posted there
        raise RefusedError(
            HTTPStatus.CONFLICT, "chat_exists", f"there is a chat {chat_key!r} already; name a new one"
        )
    new = await _made(services, old, chat_key)
    uploads = KeyFiles(services, identity, new.chat_key)
    files = await _copied_files(services.files_of(old), uploads, [*history, cause])
    copies = [dataclasses.replace(one, chat_key=chat_key, data=_data(one.data, files)) for one in history]
    async with services.database.begin() as transaction:
        await transaction.messages.copy(copies)
        size = sum(message_bytes(one) for one in copies)
        transaction.stored_bytes.add(identity.account_id, StoredKind.MESSAGES, size)
    data = _data(cause.data, files) or {}

    async def message() -> IncomingMessage:
        return IncomingMessage(
            chat_key=chat_key,
            text=cause.text,
            user_id=user_id,
            user_name=cause.sender_name or user_id,
            content_data=data.get("content_data") or (),
        )

    receipt = await post_message(services, identity, chat_key, message, once=once)
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
                copied[path] = await new.add(name, file)
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
