"""Chats by their newest activity, with what a list of them shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, func, literal, or_, select

from nekro_agent.ports import MessageKind
from storage.escaped_text import escaped
from storage.models import ChatEventRow, ChatRow, MessageRow, RoundRow
from storage.repositories.base import Repository, is_one_of
from storage.repositories.messages import Message
from storage.states import EventType, RoundState

__all__ = ["ChatListing", "ListedChat"]

#: How ``workers.rounds.turn_ends`` writes the event of a failed turn; texts come after the state.
_FAILED = '{"state": "failed"'


@dataclass(frozen=True, kw_only=True)
class ListedChat:
    """A chat in a list."""

    chat_key: str
    adapter_key: str | None
    channel_name: str | None
    channel_type: str | None
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
    ) -> list[ListedChat]:
        """List chats, the one with the newest activity first.

        Args:
            after: activity and key of the last chat of the page before; None begins.
            text: only chats whose key or name contains it; "" means all. Case is ignored, on SQLite only that
                of ASCII letters.
            prefix: only chats whose key begins with it, in this case.
        """
        statement = (
            select(
                ChatRow.chat_key,
                ChatRow.adapter_key,
                ChatRow.channel_name,
                ChatRow.channel_type,
                ChatRow.created_at,
                _active_at().label("active_at"),
                ChatRow.last_event,
            )
            .order_by(_active_at().desc(), ChatRow.chat_key)
            .limit(limit)
        )
        conditions = _conditions(after=after, text=text, prefix=prefix)
        return await self._all(ListedChat, statement.where(*conditions))

    async def last_messages(self, chat_keys: Collection[str]) -> dict[str, Message]:
        """Return the newest message of each chat that people see; chats without one are left out."""
        newest = (
            select(MessageRow.sequence)
            .where(MessageRow.chat_key == ChatRow.chat_key, MessageRow.kind != MessageKind.SYSTEM)
            .order_by(MessageRow.sequence.desc())
            .limit(1)
            .scalar_subquery()
        )
        chosen = select(newest).where(ChatRow.chat_key.in_(chat_keys))
        found = [number for number in (await self._rows(chosen)).scalars() if number is not None]
        messages = await self._all(Message, select(MessageRow).where(MessageRow.sequence.in_(found)))
        return {message.chat_key: message for message in messages}

    async def open_rounds(self, chat_keys: Collection[str]) -> dict[str, int]:
        """Count the waiting and running rounds of each chat; chats without one are left out."""
        statement = (
            select(RoundRow.chat_key, func.count())
            .where(
                RoundRow.chat_key.in_(chat_keys),
                is_one_of(RoundRow.state, RoundState.REQUESTED, RoundState.RUNNING),
            )
            .group_by(RoundRow.chat_key)
        )
        return {row[0]: row[1] for row in await self._rows(statement)}

    async def failures(self, chat_keys: Collection[str], *, since: datetime) -> dict[str, int]:
        """Count the turns of each chat that have failed since a time; chats without one are left out."""
        ended = select(RoundRow.turn_id).where(RoundRow.chat_key.in_(chat_keys), RoundRow.finished_at > since)
        statement = (
            select(ChatEventRow.chat_key, func.count(ChatEventRow.turn_id.distinct()))
            .where(
                ChatEventRow.turn_id.in_(ended),
                ChatEventRow.type == EventType.TURN_ENDED.value,
                ChatEventRow.created_at > since,
                func.substr(ChatEventRow.data, 1, len(_FAILED)) == literal(_FAILED),
            )
            .group_by(ChatEventRow.chat_key)
        )
        return {row[0]: row[1] for row in await self._rows(statement)}


def _conditions(
    *, after: tuple[datetime, str] | None, text: str, prefix: str
) -> Iterator[ColumnElement[bool]]:
    if prefix:
        # Not LIKE, which ignores case on SQLite.
        stored = escaped(prefix)
        yield func.substr(ChatRow.chat_key, 1, len(stored)) == literal(stored)
    if text:
        wanted = escaped(text).lower()
        named = (func.lower(ChatRow.chat_key), func.lower(ChatRow.channel_name))
        yield or_(*(column.contains(wanted, autoescape=True) for column in named))
    if after is not None:
        at, chat_key = after
        yield or_(_active_at() < at, and_(_active_at() == at, ChatRow.chat_key > chat_key))


def _active_at() -> ColumnElement[datetime]:
    return func.coalesce(ChatRow.active_at, ChatRow.created_at)
