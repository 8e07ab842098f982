"""The events of chats, numbered in the order of commits.

The number comes from a counter in the chat's row. The UPDATE of the counter locks that row until the
transaction ends, so a transaction that gets a larger number commits later: a reader that has seen a number
has seen all smaller ones.

The worker of a round appends its calls in batches, so what a call causes at once, a message or a job, may be
committed before the event of that call. The event of such a message or job is held back until the batch, or
what ends the round, is appended. It is a row with a negative number, which no reader asks for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

from sqlalchemy import Executable, Integer, Select, bindparam, delete, select, text, update

from nekro_agent.ports import ChatInfo
from nekro_agent.shared_clock import shared_time
from nekro_client.event_types import STARTS_OF_ATTEMPTS, EventType
from storage.driver.connection import Connection, Rows
from storage.driver.statements import FixedStatement, ListStatement
from storage.driver.values import escaped
from storage.repositories.base import Repository, columns_of
from storage.sql import KeyText, now
from storage.tables import CHAT_EVENTS, CHATS

__all__ = ["TOOLS_NOT_KEPT", "ChatEvent", "EventRepository", "NewEvent"]

#: Begins the data of ``code.ready`` in a turn whose TOOL calls are not kept as events. Workers of 0.2.0
#: keep those of a share of turns.
TOOLS_NOT_KEPT: Final = {"tool_calls_kept": False}

#: All rows of an INSERT are one parameter, a JSON array of arrays. A parameter per value would take several
#: times as long, and a round writes two events per call.
_INSERT: Final = """
INSERT INTO chat_events
    (chat_key, number, type, turn_id, round_id, call_id, message_id, data, created_at)
"""
_SELECT: Final = {
    "sqlite": """
SELECT :of_chat, {before} + 1 + key,
    json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]'),
    json_extract(value, '$[6]')
FROM json_each(:rows)
""",
    "postgresql": """
SELECT CAST(:of_chat AS text), {before} + place,
    value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
    CAST((value ->> 6) || '+00' AS timestamptz)
FROM json_array_elements(CAST(:rows AS json)) WITH ORDINALITY AS given (value, place)
""",
}

#: The number before the first one of these events, and before one that is held back, which is the lowest.
_BEFORE: Final = "CAST(:before AS bigint)"
_BEFORE_HELD: Final = """
(SELECT coalesce(min(number), 0) - 2 FROM chat_events WHERE chat_key = :of_chat AND number < 0)
"""

#: True if the round's answer is recorded, but neither its end nor this call's start, which is then appended
#: later. False for calls whose start is never appended: a TOOL call in a turn that does not keep those has no
#: row in ``calls``, and a worker of a release that appends no calls appends no answer either.
_IF_EARLY: Final = """
WHERE EXISTS (
    SELECT 1 FROM chat_events
    WHERE turn_id = :of_turn AND round_id = :of_round AND type = :answered
) AND NOT EXISTS (
    SELECT 1 FROM chat_events
    WHERE turn_id = :of_turn AND round_id = :of_round
        AND (type = :ended OR type = :called AND call_id = :of_call)
) AND (EXISTS (SELECT 1 FROM calls WHERE id = :of_call) OR NOT EXISTS (
    SELECT 1 FROM chat_events
    WHERE turn_id = :of_turn AND round_id = :of_round AND type = :answered
        AND substr(data, 1, length(:keeps_no_tools)) = :keeps_no_tools
))
RETURNING number
"""
_OF_EARLY: Final = {
    "answered": EventType.CODE_READY.value,
    "ended": EventType.ROUND_ENDED.value,
    "called": EventType.CALL_STARTED.value,
    # JSON of other data cannot begin like this.
    "keeps_no_tools": json.dumps(TOOLS_NOT_KEPT)[:-1],
}

#: A transaction that appends one of them also appends what was held back.
_RELEASING: Final = STARTS_OF_ATTEMPTS | {EventType.CALL_STARTED, EventType.ROUND_ENDED}
#: What was held back comes before them.
_LATER: Final = STARTS_OF_ATTEMPTS | {EventType.ROUND_ENDED, EventType.TURN_ENDED}


@dataclass(frozen=True, kw_only=True)
class NewEvent:
    """An event to append."""

    type: str
    turn_id: str | None = None
    round_id: str | None = None
    call_id: str | None = None
    message_id: str | None = None
    #: Plain JSON data; what it holds depends on the type.
    data: dict[str, Any] = field(default_factory=dict)
    #: When it happened.
    created_at: datetime = field(default_factory=shared_time)


@dataclass(frozen=True, kw_only=True)
class ChatEvent(NewEvent):
    """An event of a chat."""

    chat_key: str
    #: Grows by 1 within a chat.
    number: int


class EventRepository(Repository):
    """Rows of events."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._waiting: dict[str, list[NewEvent]] = {}
        #: The newest number of each chat that ``flush`` appended to.
        self.numbers: dict[str, int] = {}
        #: The types of the events that ``flush`` appended to each chat.
        self.types: dict[str, frozenset[str]] = {}
        self._chats: dict[str, Rows] = {}

    def add(self, chat_key: str, *events: NewEvent) -> None:
        """Append events at the end of the transaction, all with one statement for the numbers."""
        self._waiting.setdefault(chat_key, []).extend(events)

    def has_waiting(self, chat_key: str) -> bool:
        """Whether events of the chat wait for the end of the transaction."""
        return bool(self._waiting.get(chat_key))

    def name_turn(self, chat_key: str, *, message_id: str, turn_id: str) -> None:
        """Name the turn of a message whose event waits for the end of the transaction."""
        waiting = self._waiting.get(chat_key, [])
        for at, event in enumerate(waiting):
            if event.message_id == message_id and event.turn_id is None:
                waiting[at] = dataclasses.replace(event, turn_id=turn_id)

    async def flush(self) -> None:
        """Append the events that wait; ``Database.begin`` calls this before the commit.

        Events of a chat without a row are dropped.
        """
        waiting, self._waiting = self._waiting, {}
        for chat_key, events in waiting.items():
            if not _RELEASING.isdisjoint(event.type for event in events):
                events = _merged(events, await self._release(chat_key))
            await self.append(chat_key, events)

    def chat(self, chat_key: str) -> ChatInfo | None:
        """Return a chat as it was when events were appended to it; None if none were."""
        rows = self._chats.get(chat_key)
        return None if rows is None else next(iter(self._values(ChatInfo, rows)), None)

    async def append(self, chat_key: str, events: Sequence[NewEvent]) -> int | None:
        """Append events to a chat; returns the number of the last one, None if the chat has no row."""
        chats = await self._rows(_count_statement, {"of_chat": chat_key, "added": len(events)})
        last = chats.scalar()
        if last is None:
            return None
        self._chats[chat_key] = chats
        rows = json.dumps([_row(event) for event in events])
        values = {"of_chat": chat_key, "before": last - len(events), "rows": rows}
        await self._connection.execute(_insert_statement, values)
        self.numbers[chat_key] = last
        self.types[chat_key] = self.types.get(chat_key, frozenset()).union(event.type for event in events)
        return int(last)

    async def hold_back(self, chat_key: str, event: NewEvent) -> bool:
        """Keep an event of a call until its round appends the call; False if the event is to be appended now.

        It is kept while the round goes on and has yet to append the call. The transaction must have locked
        the chat.
        """
        if event.call_id is None or event.round_id is None or event.turn_id is None:
            return False
        values = {
            "of_chat": chat_key,
            "of_turn": event.turn_id,
            "of_round": event.round_id,
            "of_call": event.call_id,
            "rows": json.dumps([_row(event)]),
        }
        return await self._scalar(_hold_statement, values) is not None

    async def _release(self, chat_key: str) -> list[ChatEvent]:
        held = await self._all(ChatEvent, _release_statement, {"of_chat": chat_key})
        return sorted(held, key=lambda event: -event.number)

    async def after(self, chat_key: str, *, number: int, limit: int) -> list[ChatEvent]:
        """List the events after ``number`` in a chat, in order."""
        values = {"of_chat": chat_key, "after": number, "most": limit}
        return await self._all(ChatEvent, _after_statement, values)

    async def newest_numbers(self, chat_keys: Collection[str]) -> dict[str, int]:
        """Return the number of the newest event of each chat; chats without a row are left out."""
        statement = select(CHATS.c.chat_key, CHATS.c.last_event).where(CHATS.c.chat_key.in_(chat_keys))
        return {row[0]: row[1] for row in await self._rows(statement)}

    async def newest(self, chat_keys: Collection[str]) -> dict[str, tuple[int, datetime | None]]:
        """Return the number of the newest event of each chat, and its time; None if retention deleted it.

        Chats without a row are left out.
        """
        found = await self._rows(_newest_statement(), {"chats": list(chat_keys)})
        return {row[0]: (row[1], row[2]) for row in found}

    async def of_turn(
        self,
        turn_id: str,
        *,
        types: Collection[str] = (),
        call_id: str | None = None,
    ) -> list[ChatEvent]:
        """List the events of a turn in order.

        Args:
            types: only events of these types; () means all.
            call_id: only events of this call; None means all.
        """
        if not types and call_id is None:
            return await self._all(ChatEvent, _of_turn_statement, {"of_turn": turn_id})
        statement = select(CHAT_EVENTS).where(CHAT_EVENTS.c.turn_id == turn_id, CHAT_EVENTS.c.number > 0)
        if types:
            statement = statement.where(CHAT_EVENTS.c.type.in_(types))
        if call_id is not None:
            statement = statement.where(CHAT_EVENTS.c.call_id == call_id)
        return await self._all(ChatEvent, statement.order_by(CHAT_EVENTS.c.number))

    async def begin_of_turn(self, turn_id: str) -> int | None:
        """Return the number of the oldest event of a turn; None if all have expired."""
        number: int | None = await self._scalar(_begin_statement, {"of_turn": turn_id})
        return number

    async def end_of_turn(self, turn_id: str) -> ChatEvent | None:
        """Return the last event of an ended turn; None while it is open, or if the event has expired."""
        return await self._one_or_none(ChatEvent, _end_statement, {"of_turn": turn_id})


def _merged(events: Sequence[NewEvent], held: Sequence[NewEvent]) -> list[NewEvent]:
    """Put each event that was held back before the end of its call, of its round and of its turn."""
    merged = list(events)
    for event in held:
        ends = (
            at
            for at, other in enumerate(merged)
            if other.type in _LATER or (other.type == EventType.CALL_ENDED and other.call_id == event.call_id)
        )
        merged.insert(next(ends, len(merged)), event)
    return merged


def _row(event: NewEvent) -> list[str | None]:
    """Return the columns of an event as the database stores them, without its chat and number."""
    texts = (event.type, event.turn_id, event.round_id, event.call_id, event.message_id)
    return [
        *(None if value is None else escaped(value) for value in texts),
        json.dumps(event.data),
        event.created_at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    ]


@FixedStatement
def _count_statement(_dialect: str) -> Executable:
    return (
        update(CHATS)
        .where(CHATS.c.chat_key == bindparam("of_chat"))
        .values(last_event=CHATS.c.last_event + bindparam("added", type_=Integer), active_at=now())
        .returning(CHATS.c.last_event, *columns_of(CHATS, ChatInfo))
    )


@cache
def _newest_statement() -> Executable:
    is_newest = (CHAT_EVENTS.c.chat_key == CHATS.c.chat_key) & (CHAT_EVENTS.c.number == CHATS.c.last_event)
    columns = CHATS.c.chat_key, CHATS.c.last_event, CHAT_EVENTS.c.created_at
    is_chosen = CHATS.c.chat_key.in_(bindparam("chats", expanding=True))
    return select(*columns).outerjoin(CHAT_EVENTS, is_newest).where(is_chosen)


@FixedStatement
def _after_statement(_dialect: str) -> Executable:
    return (
        select(CHAT_EVENTS)
        .where(
            CHAT_EVENTS.c.chat_key == bindparam("of_chat"),
            CHAT_EVENTS.c.number > bindparam("after", type_=Integer),
        )
        .order_by(CHAT_EVENTS.c.number)
        .limit(bindparam("most", type_=Integer))
    )


@ListStatement
def _of_turn_statement(_dialect: str) -> Executable:
    return _of_turn(CHAT_EVENTS).order_by(CHAT_EVENTS.c.number)


@FixedStatement
def _begin_statement(_dialect: str) -> Executable:
    return _of_turn(CHAT_EVENTS.c.number).order_by(CHAT_EVENTS.c.number).limit(1)


@FixedStatement
def _end_statement(_dialect: str) -> Executable:
    is_end = CHAT_EVENTS.c.type == EventType.TURN_ENDED.value
    return _of_turn(CHAT_EVENTS).where(is_end).order_by(CHAT_EVENTS.c.number).limit(1)


def _of_turn(*columns: Any) -> Select[Any]:
    is_own = CHAT_EVENTS.c.turn_id == bindparam("of_turn")
    return select(*columns).where(is_own, CHAT_EVENTS.c.number > 0)


@FixedStatement
def _release_statement(_dialect: str) -> Executable:
    return (
        delete(CHAT_EVENTS)
        .where(CHAT_EVENTS.c.chat_key == bindparam("of_chat"), CHAT_EVENTS.c.number < 0)
        .returning(CHAT_EVENTS)
    )


@FixedStatement
def _insert_statement(dialect: str) -> Executable:
    statement = _INSERT + _SELECT[dialect].format(before=_BEFORE)
    return text(statement).bindparams(bindparam("of_chat", type_=KeyText()))


@FixedStatement
def _hold_statement(dialect: str) -> Executable:
    statement = _INSERT + _SELECT[dialect].format(before=_BEFORE_HELD) + _IF_EARLY
    named = [bindparam(name, type_=KeyText()) for name in ("of_chat", "of_turn", "of_round", "of_call")]
    return text(statement).bindparams(*named, *(bindparam(name, value) for name, value in _OF_EARLY.items()))
