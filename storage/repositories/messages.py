"""A chat's messages, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import Executable, Integer, bindparam, select, update

from nekro_agent.ports import MessageKind
from storage.driver.statements import FixedStatement, ListStatement
from storage.repositories.base import Repository, found, parameters_of, values_of
from storage.repositories.chats import ChatRepository
from storage.sql import insert, now
from storage.states import new_id
from storage.tables import CHATS, MESSAGES

__all__ = ["ANSWER_KEY", "COPY_PREFIX", "Message", "MessageRepository", "NewMessage"]

#: Begins the deduplication keys of messages that were copied from another chat.
COPY_PREFIX: Final = "copy:"
#: Begins that of a round's answer in words, before the id of the round.
ANSWER_KEY: Final = "answer"


@dataclass(frozen=True, kw_only=True)
class NewMessage:
    """A message to append."""

    chat_key: str
    kind: MessageKind
    text: str
    id: str = field(default_factory=new_id)
    sender_id: str | None = None
    sender_name: str | None = None
    #: Plain JSON data: segments, images, files.
    data: dict[str, Any] | None = None
    call_id: str | None = None
    round_id: str | None = None
    #: The turn that it started or that sent it.
    turn_id: str | None = None
    plugin_key: str | None = None
    #: Deduplication key, such as ``observation:<call id>`` or a platform's message id; None for
    #: messages that may repeat.
    once_key: str | None = None
    #: SHA-256 of what a repetition with ``once_key`` must repeat; None: it is not compared.
    once_digest: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Message(NewMessage):
    """A message of a chat's history."""

    #: Position among all messages; within a chat, a larger one was committed later.
    sequence: int
    created_at: datetime

    @property
    def is_hidden(self) -> bool:
        """Whether no prompt shows it: it was recalled, or sent with ``record=False``."""
        data = self.data or {}
        return bool(data.get("hidden") or data.get("is_recalled"))


class MessageRepository(Repository):
    """Rows of messages."""

    async def append(self, message: NewMessage) -> tuple[Message, bool]:
        """Add a message at the end of its chat unless its id or ``once_key`` exists.

        Returns the stored message, and True if it is new.

        Raises:
            NotFoundError: the chat has no row.
        """
        await ChatRepository(self._connection).lock(message.chat_key)
        new = await self._one_or_none(Message, _append_statement(), values_of(message, NewMessage))
        if new is not None:
            return new, True
        same = MESSAGES.c.id == message.id
        if message.once_key is not None:
            same |= MESSAGES.c.once_key == message.once_key
        old = await self._one_or_none(Message, select(MESSAGES).where(same).limit(1))
        return found(old, "message", message.id), False

    async def find(self, message_id: str) -> Message | None:
        """Return the message, or None."""
        return await self._one_or_none(Message, select(MESSAGES).where(MESSAGES.c.id == message_id))

    async def find_once(self, once_key: str) -> Message | None:
        """Return the message with a deduplication key, or None."""
        return await self._one_or_none(Message, _once_statement, {"of_key": once_key})

    async def newest(
        self,
        chat_key: str,
        *,
        limit: int,
        since: int = 0,
        before: int | None = None,
        with_past: bool = False,
    ) -> list[Message]:
        """List the newest messages of a chat, the oldest of them first.

        Args:
            since: only the message with this sequence and later ones.
            before: only messages with a smaller sequence, for paging; None does not limit.
            with_past: also messages from before the last ``ChatRepository.reset``.
        """
        values: dict[str, Any] = {"of_chat": chat_key, "most": limit, "since": since}
        if before is not None:
            values["before"] = before
        statement = _newest_statement(is_paged=before is not None, with_past=with_past)
        return (await self._all(Message, statement, values))[::-1]

    async def after(self, chat_key: str, *, sequence: int, limit: int) -> list[Message]:
        """List the messages after ``sequence`` in a chat, in order.

        A reader that continues from the last message's sequence misses none and sees none twice.
        """
        statement = (
            select(MESSAGES)
            .where(MESSAGES.c.chat_key == chat_key, MESSAGES.c.sequence > sequence)
            .order_by(MESSAGES.c.sequence)
            .limit(limit)
        )
        return await self._all(Message, statement)

    async def of_turn(self, turn_id: str) -> list[Message]:
        """List the messages of a turn, in order."""
        return await self._all(Message, _of_turn_statement, {"of_turn": turn_id})

    async def before(self, message: Message, *, limit: int) -> list[Message]:
        """List the newest messages before one in its conversation, in order.

        The conversation began with the chat's last reset before the message, if that was the last one of all;
        of earlier resets nothing is recorded.
        """
        beginning = await self._scalar(
            select(CHATS.c.history_after).where(CHATS.c.chat_key == message.chat_key)
        )
        statement = select(MESSAGES).where(
            MESSAGES.c.chat_key == message.chat_key, MESSAGES.c.sequence < message.sequence
        )
        if beginning and beginning < message.sequence:
            statement = statement.where(MESSAGES.c.sequence > beginning)
        newest = await self._all(Message, statement.order_by(MESSAGES.c.sequence.desc()).limit(limit))
        return newest[::-1]

    async def copy(self, messages: Sequence[Message]) -> None:
        """Append messages of another chat to the chat that they name now, under new ids, with their times.

        They belong to no turn, call or round there. A message that was copied there before is left out.

        Raises:
            NotFoundError: the chat has no row.
        """
        for message in messages:
            await ChatRepository(self._connection).lock(message.chat_key)
            digest = sha256(message.chat_key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
            values = values_of(message, NewMessage) | {
                "id": new_id(),
                "once_key": f"{COPY_PREFIX}{digest}:{message.id}",
                "once_digest": None,
                "call_id": None,
                "round_id": None,
                "turn_id": None,
                "created_at": message.created_at,
            }
            new = insert(self._dialect, MESSAGES).values(values)
            await self._rows(new.on_conflict_do_nothing())

    async def name_turn(self, message_id: str, turn_id: str) -> None:
        """Record the turn that a message started."""
        await self._count(update(MESSAGES).where(MESSAGES.c.id == message_id).values(turn_id=turn_id))


@cache
def _newest_statement(*, is_paged: bool, with_past: bool) -> FixedStatement:
    statement = select(MESSAGES).where(
        MESSAGES.c.chat_key == bindparam("of_chat"), MESSAGES.c.sequence >= bindparam("since")
    )
    if is_paged:
        statement = statement.where(MESSAGES.c.sequence < bindparam("before"))
    if not with_past:
        beginning = select(CHATS.c.history_after).where(CHATS.c.chat_key == bindparam("of_chat"))
        statement = statement.where(MESSAGES.c.sequence > beginning.scalar_subquery())
    newest = statement.order_by(MESSAGES.c.sequence.desc()).limit(bindparam("most", type_=Integer))
    return FixedStatement(lambda _dialect: newest)


@ListStatement
def _of_turn_statement(_dialect: str) -> Executable:
    is_own = MESSAGES.c.turn_id == bindparam("of_turn")
    return select(MESSAGES).where(is_own).order_by(MESSAGES.c.sequence)


@FixedStatement
def _once_statement(_dialect: str) -> Executable:
    return select(MESSAGES).where(MESSAGES.c.once_key == bindparam("of_key"))


@cache
def _append_statement() -> FixedStatement:
    given = parameters_of(NewMessage)

    @FixedStatement
    def statement(dialect: str) -> Executable:
        new = insert(dialect, MESSAGES).values({**given, "created_at": now()})
        return new.on_conflict_do_nothing().returning(MESSAGES)

    return statement
