"""Lists for people: chats by their newest activity, and turns by state, time, model, plugin and cost.

The end of rounds records for the search of turns. Terms are the names of models and plugins, with a row for
each turn and name. An open turn has no state here and no cost yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from operator import attrgetter
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Executable,
    and_,
    bindparam,
    exists,
    func,
    literal,
    or_,
    select,
    tuple_,
    union_all,
    update,
)

from nekro_agent.ports import MessageKind
from nekro_client.event_types import EventType
from storage.driver.statements import FixedStatement
from storage.driver.values import escaped
from storage.repositories.base import Repository, columns_of, is_one_of
from storage.repositories.events import ChatEvent
from storage.repositories.messages import Message
from storage.repositories.rounds import Round
from storage.sql import FaithfulText, KeyText, insert
from storage.states import RoundState, TriggerKind
from storage.tables import CHAT_EVENTS, CHATS, MESSAGES, ROUNDS, TURN_TERMS

__all__ = [
    "TRANSIENT",
    "ChatListing",
    "ListedChat",
    "ListedRound",
    "TurnFilter",
    "TurnListing",
    "TurnPosition",
    "TurnSearch",
    "terms_of",
]


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
        conditions = [*_of_chats(after=after, text=text, prefix=prefix)]
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


def _of_chats(*, after: tuple[datetime, str] | None, text: str, prefix: str) -> Iterator[ColumnElement[bool]]:
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


@dataclass(frozen=True, kw_only=True)
class ListedRound:
    """A round without its texts and calls, which may be long."""

    sequence: int
    id: str
    chat_key: str
    turn_id: str
    state: RoundState
    trigger_kind: TriggerKind
    trigger_id: str
    attempt: int
    user_id: str | None
    merged_into: str | None
    requested_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens_estimated: bool | None
    cost: float | None
    error: str | None


_COLUMNS: Final = columns_of(ROUNDS, ListedRound)


class TurnListing(Repository):
    """Reads turns for lists."""

    async def rounds(self, turn_ids: Collection[str]) -> list[ListedRound]:
        """List the rounds of turns, in order."""
        statement = select(*_COLUMNS).where(ROUNDS.c.turn_id.in_(turn_ids)).order_by(ROUNDS.c.sequence)
        return await self._all(ListedRound, statement)

    async def by_id(self, round_ids: Collection[str]) -> dict[str, ListedRound]:
        """Return rounds by their ids; those that do not exist are left out."""
        statement = select(*_COLUMNS).where(ROUNDS.c.id.in_(round_ids))
        return {item.id: item for item in await self._all(ListedRound, statement)}

    async def caused(self, kind: TriggerKind, trigger_ids: Collection[str]) -> list[ListedRound]:
        """List the rounds that were caused by some triggers of one kind, in order."""
        if not trigger_ids:
            return []
        is_caused = (ROUNDS.c.trigger_kind == kind) & ROUNDS.c.trigger_id.in_(trigger_ids)
        return await self._all(ListedRound, select(*_COLUMNS).where(is_caused).order_by(ROUNDS.c.sequence))

    async def ends(self, turn_ids: Collection[str]) -> dict[str, ChatEvent]:
        """Return the last event of each ended turn, by the turns' ids."""
        statement = select(CHAT_EVENTS).where(
            CHAT_EVENTS.c.turn_id.in_(turn_ids), CHAT_EVENTS.c.type == EventType.TURN_ENDED.value
        )
        return {event.turn_id or "": event for event in await self._all(ChatEvent, statement)}

    async def texts(self, message_ids: Collection[str]) -> dict[str, str]:
        """Return the texts of messages by their ids."""
        statement = select(MESSAGES.c.id, MESSAGES.c.text).where(MESSAGES.c.id.in_(message_ids))
        return {row[0]: row[1] for row in await self._rows(statement)}


#: Characters of a name in a term; with its escapes it is shorter than the longest key.
_NAME_CHARS: Final = 150
#: Terms that one statement records; rounds rarely call more plugins.
_AT_ONCE: Final = 4


@dataclass(frozen=True, kw_only=True)
class TurnPosition:
    """Where a page begins: behind this turn."""

    requested_at: datetime
    #: Of the turn's first round.
    sequence: int


@dataclass(frozen=True, kw_only=True)
class TurnFilter:
    """Which turns are listed; the fields that are given must all fit."""

    chat_key: str | None = None
    #: Only chats whose key begins with it, in this case.
    prefix: str = ""
    #: Only turns that were requested then or later, and before.
    since: datetime | None = None
    until: datetime | None = None
    #: Only ended turns that cost at least that.
    min_cost: float | None = None
    #: A model that answered, as rounds name it.
    model: str | None = None
    #: A plugin whose methods were called.
    plugin: str | None = None
    #: Only turns whose ids begin with it.
    beginning: str = ""

    @property
    def terms(self) -> list[str]:
        """The terms that a turn must have."""
        plugins = [] if self.plugin is None else [_term("plugin", self.plugin)]
        return plugins + ([] if self.model is None else [_term("model", self.model)])


class TurnSearch(Repository):
    """Records by what turns are found, and finds them."""

    async def page(
        self,
        wanted: TurnFilter,
        *,
        states: Collection[str | None] | None,
        limit: int,
        after: TurnPosition | None = None,
    ) -> list[ListedRound]:
        """List the first rounds of turns, the newest first.

        Args:
            states: only turns in one of these states; None among them: that have not ended. None: any.
            after: the last one of the page before; None begins.
        """
        if states is None:
            return await self._page(wanted, limit=limit, after=after)
        # A query each: only for one state the index has the turns in order.
        found = [
            item
            for state in states
            for item in await self._page(wanted, _is_in(state), limit=limit, after=after)
        ]
        place = ("requested_at", "sequence") if wanted.chat_key is None else ("sequence",)
        return sorted(found, key=attrgetter(*place), reverse=True)[:limit]

    async def _page(
        self, wanted: TurnFilter, *conditions: ColumnElement[bool], limit: int, after: TurnPosition | None
    ) -> list[ListedRound]:
        terms = wanted.terms
        order: tuple[ColumnElement[datetime], ColumnElement[int]]
        order = (ROUNDS.c.requested_at, ROUNDS.c.sequence)
        statement = select(*_COLUMNS).where(ROUNDS.c.id == ROUNDS.c.turn_id, *conditions)
        if wanted.chat_key is not None:
            # Within a chat, the sequence is in the order of the times, too, and has an index.
            statement = statement.where(ROUNDS.c.chat_key == wanted.chat_key)
            if after is not None:
                statement = statement.where(ROUNDS.c.sequence < after.sequence)
            statement = statement.order_by(ROUNDS.c.sequence.desc())
        else:
            if terms:
                statement = statement.join(TURN_TERMS, TURN_TERMS.c.sequence == ROUNDS.c.sequence)
                statement = statement.where(TURN_TERMS.c.term == terms.pop(0))
                order = (TURN_TERMS.c.requested_at, TURN_TERMS.c.sequence)
            if after is not None:
                place = tuple_(literal(after.requested_at, order[0].type), literal(after.sequence))
                statement = statement.where(tuple_(*order) < place)
            statement = statement.order_by(*(column.desc() for column in order))
        others = (_has(term) for term in terms)
        statement = statement.where(*_of_turns(wanted, order[0]), *others)
        return await self._all(ListedRound, statement.limit(limit))

    async def add_round(self, ended: Round, *, known: Collection[str] = ()) -> None:
        """Record the terms of a round that has ended; idempotent.

        Args:
            known: terms that are recorded for its turn.
        """
        terms = [term for term in terms_of(ended) if term not in known]
        for at in range(0, len(terms), _AT_ONCE):
            some = terms[at : at + _AT_ONCE]
            values = {f"term_{number}": term for number, term in enumerate(some)}
            await self._rows(_terms_statement(len(some)), {"of_turn": ended.turn_id, **values})

    async def end_turn(self, turn_id: str, state: str) -> None:
        """Record the state and the cost of a turn that has ended."""
        await self._rows(_end_statement, {"of_turn": turn_id, "state": state})


def terms_of(ended: Round) -> list[str]:
    """Return the terms of a round that has ended."""
    called = {call["method"].rpartition(".")[0] for call in ended.calls or ()}
    terms = sorted(_term("plugin", key) for key in called if key)
    return terms if ended.model is None else [*terms, _term("model", ended.model)]


def _is_in(state: str | None) -> ColumnElement[bool]:
    return ROUNDS.c.turn_state.is_(None) if state is None else ROUNDS.c.turn_state == state


def _term(kind: str, name: str) -> str:
    return f"{kind}:{name[:_NAME_CHARS]}"


def _has(term: str) -> ColumnElement[bool]:
    also = TURN_TERMS.alias()
    return exists().where(also.c.sequence == ROUNDS.c.sequence, also.c.term == term)


def _of_turns(wanted: TurnFilter, requested_at: ColumnElement[datetime]) -> Iterator[ColumnElement[bool]]:
    if wanted.since is not None:
        yield requested_at >= wanted.since
    if wanted.until is not None:
        yield requested_at < wanted.until
    if wanted.min_cost is not None:
        yield ROUNDS.c.turn_cost >= wanted.min_cost
    if wanted.beginning:
        yield ROUNDS.c.id.startswith(wanted.beginning, autoescape=True)
    if wanted.prefix:
        # Not LIKE, which ignores case on SQLite.
        stored = escaped(wanted.prefix)
        yield func.substr(ROUNDS.c.chat_key, 1, len(stored)) == literal(stored)


@cache
def _terms_statement(terms: int) -> FixedStatement:
    """Insert so many terms of a turn."""
    rows = [
        select(ROUNDS.c.sequence, bindparam(f"term_{number}", type_=KeyText()), ROUNDS.c.requested_at).where(
            ROUNDS.c.id == bindparam("of_turn", type_=KeyText())
        )
        for number in range(terms)
    ]
    return FixedStatement(
        lambda dialect: (
            insert(dialect, TURN_TERMS)
            .from_select(["sequence", "term", "requested_at"], union_all(*rows))
            .on_conflict_do_nothing()
        )
    )


@FixedStatement
def _end_statement(_dialect: str) -> Executable:
    of_turn = ROUNDS.alias()
    turn_id = bindparam("of_turn", type_=KeyText())
    cost = select(func.sum(of_turn.c.cost)).where(of_turn.c.turn_id == turn_id).scalar_subquery()
    return update(ROUNDS).where(ROUNDS.c.id == turn_id).values(turn_state=bindparam("state"), turn_cost=cost)
