"""Chats by their newest activity, with what a list of them shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, func, literal, or_, select

from nekro_agent.ports import MessageKind
from storage.driver.values import escaped
from storage.repositories.base import Repository, is_one_of
from storage.repositories.messages import Message
from storage.sql import FaithfulText
from storage.states import RoundState
from storage.tables import CHATS, MESSAGES, ROUNDS

__all__ = ["TRANSIENT", "ChatListing", "ListedChat"]

#: In the keys of chats that only one request needs.
TRANSIENT: Final = "private_transient_"

#: A title is made from at most this many characters of a message, some of which it leaves out.
_BEGINNING_CHARS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class ListedChat:
    """A chat in a list."""

    chat_key: str
    adapter_key: str | None
    channel_name: str | None
    channel_type: str | None
    #: The title that was given to it.
    title: str | None
    created_at: datetime
    #: When something last happened in it.
    active_at: datetime
    #: Number of its newest event; 0 without one.
    last_event: int


class ChatListing(Repository):
    """Reads chats for lists."""

    async def page(
        self,
        *,
        limit: int,
        after: tuple[datetime, str] | None = None,
        text: str = "",
        prefix: str = "",
        with_transient: bool = True,
    ) -> list[ListedChat]:
        """List chats, the one with the newest activity first.

        Args:
            after: activity and key of the last chat of the page before; None begins.
            text: only chats whose key, name or given title contains it; "" means all. Case is ignored, on
                SQLite only that of ASCII letters.
            prefix: only chats whose key begins with it, in this case.
            with_transient: also chats that one request has made for itself.
        """
        statement = select(*_columns()).order_by(_active_at().desc(), CHATS.c.chat_key).limit(limit)
        conditions = [*_conditions(after=after, text=text, prefix=prefix)]
        if not with_transient:
            conditions.append(~CHATS.c.chat_key.contains(TRANSIENT, autoescape=True))
        return await self._all(ListedChat, statement.where(*conditions))

    async def find(self, chat_key: str) -> ListedChat | None:
        """Return a chat, or None."""
        return await self._one_or_none(ListedChat, select(*_columns()).where(CHATS.c.chat_key == chat_key))

    async def first_words(self, chat_keys: Collection[str]) -> dict[str, str]:
        """Return how the oldest message of a person with words begins in each chat; others are left out."""
        if not chat_keys:
            return {}
        oldest = (
            select(MESSAGES.c.sequence)
            .where(
                MESSAGES.c.chat_key == CHATS.c.chat_key,
                MESSAGES.c.kind == MessageKind.USER,
                MESSAGES.c.text != "",
            )
            .order_by(MESSAGES.c.sequence)
            .limit(1)
            .scalar_subquery()
        )
        chosen = select(oldest).where(CHATS.c.chat_key.in_(chat_keys))
        found = [number for number in (await self._rows(chosen)).scalars() if number is not None]
        beginning = func.substr(MESSAGES.c.text, 1, _BEGINNING_CHARS, type_=FaithfulText())
        texts = select(MESSAGES.c.chat_key, beginning).where(MESSAGES.c.sequence.in_(found))
        return {row[0]: row[1] for row in await self._rows(texts)}

    async def last_messages(self, chat_keys: Collection[str]) -> dict[str, Message]:
        """Return the newest message of each chat that people see; chats without one are left out."""
        newest = (
            select(MESSAGES.c.sequence)
            .where(MESSAGES.c.chat_key == CHATS.c.chat_key, MESSAGES.c.kind != MessageKind.SYSTEM)
            .order_by(MESSAGES.c.sequence.desc())
            .limit(1)
            .scalar_subquery()
        )
        chosen = select(newest).where(CHATS.c.chat_key.in_(chat_keys))
        found = [number for number in (await self._rows(chosen)).scalars() if number is not None]
        messages = await self._all(Message, select(MESSAGES).where(MESSAGES.c.sequence.in_(found)))
        return {message.chat_key: message for message in messages}

    async def open_rounds(self, chat_keys: Collection[str]) -> dict[str, int]:
        """Count the waiting and running rounds of each chat; chats without one are left out."""
        statement = (
            select(ROUNDS.c.chat_key, func.count())
            .where(
                ROUNDS.c.chat_key.in_(chat_keys),
                is_one_of(ROUNDS.c.state, RoundState.REQUESTED, RoundState.RUNNING),
            )
            .group_by(ROUNDS.c.chat_key)
        )
        return {row[0]: row[1] for row in await self._rows(statement)}

    async def failures(self, chat_keys: Collection[str], *, since: datetime) -> dict[str, int]:
        """Count the turns of each chat that have failed since a time; chats without one are left out."""
        ended = select(ROUNDS.c.turn_id).where(ROUNDS.c.chat_key.in_(chat_keys), ROUNDS.c.finished_at > since)
        statement = (
            select(ROUNDS.c.chat_key, func.count())
            .where(ROUNDS.c.id.in_(ended), ROUNDS.c.turn_state == RoundState.FAILED.value)
            .group_by(ROUNDS.c.chat_key)
        )
        return {row[0]: row[1] for row in await self._rows(statement)}


def _conditions(
    *, after: tuple[datetime, str] | None, text: str, prefix: str
) -> Iterator[ColumnElement[bool]]:
    if prefix:
        # Not LIKE, which ignores case on SQLite.
        stored = escaped(prefix)
        yield func.substr(CHATS.c.chat_key, 1, len(stored)) == literal(stored)
    if text:
        wanted = escaped(text).lower()
        named = (func.lower(column) for column in (CHATS.c.chat_key, CHATS.c.channel_name, CHATS.c.title))
        yield or_(*(column.contains(wanted, autoescape=True) for column in named))
    if after is not None:
        at, chat_key = after
        yield or_(_active_at() < at, and_(_active_at() == at, CHATS.c.chat_key > chat_key))


def _columns() -> tuple[ColumnElement[Any], ...]:
    return (
        CHATS.c.chat_key,
        CHATS.c.adapter_key,
        CHATS.c.channel_name,
        CHATS.c.channel_type,
        CHATS.c.title,
        CHATS.c.created_at,
        _active_at().label("active_at"),
        CHATS.c.last_event,
    )


def _active_at() -> ColumnElement[datetime]:
    return func.coalesce(CHATS.c.active_at, CHATS.c.created_at)
