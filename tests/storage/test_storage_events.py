"""Events of chats: one sequence per chat, in the order of commits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from waiting import eventually

from broker_config.settings import RetentionSettings
from nekro_agent.errors import ConflictError
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.events import ChatEvent, NewEvent
from storage.retention import delete_expired

CHAT = "chat"


@pytest.fixture(autouse=True)
async def chats(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure(CHAT)
        await tx.chats.ensure("other")


async def _read(database: Database, after: int = 0, *, limit: int = 1000) -> list[ChatEvent]:
    async with database.read() as tx:
        return await tx.events.after(CHAT, number=after, limit=limit)


def _events(count: int, kind: str = "call.started") -> list[NewEvent]:
    return [NewEvent(type=kind, data={"n": n}) for n in range(count)]


async def test_an_event_is_read_back_equal(database: Database) -> None:
    new = NewEvent(
        type=EventType.CALL_ENDED,
        turn_id="t",
        round_id="r",
        call_id="c",
        message_id="m",
        data={"text": "a\0\ud800", "list": [1, None]},
    )
    async with database.begin() as tx:
        tx.events.add(CHAT, new)
    (event,) = await _read(database)
    assert event == ChatEvent(**vars(new), chat_key=CHAT, number=1)


async def test_numbers_grow_by_one_per_chat_and_events_page_in_order(database: Database) -> None:
    async with database.begin() as tx:
        tx.events.add(CHAT, *_events(120))
        tx.events.add("other", *_events(2))
        tx.events.add(CHAT, *_events(1, "turn.ended"))
    assert tx.events.numbers == {CHAT: 121, "other": 2}
    first = await _read(database, limit=100)
    rest = await _read(database, 100, limit=100)
    assert [event.number for event in first + rest] == list(range(1, 122))
    assert [event.data["n"] for event in first] == list(range(100))
    assert rest[-1].type == "turn.ended"
    async with database.read() as tx:
        assert await tx.events.newest_numbers([CHAT, "other", "unknown"]) == {CHAT: 121, "other": 2}


async def test_a_rolled_back_transaction_leaves_neither_events_nor_a_gap(database: Database) -> None:
    with pytest.raises(ConflictError, match="no"):
        async with database.begin() as tx:
            await tx.events.append(CHAT, _events(3))
            raise ConflictError("no")
    async with database.begin() as tx:
        tx.events.add(CHAT, *_events(1))
    assert [event.number for event in await _read(database)] == [1]


async def test_events_of_a_chat_without_a_row_are_dropped(database: Database) -> None:
    async with database.begin() as tx:
        tx.events.add("unknown", *_events(1))
    assert tx.events.numbers == {}


async def test_the_turn_of_a_waiting_message_event_is_named_later(database: Database) -> None:
    async with database.begin() as tx:
        tx.events.add(CHAT, NewEvent(type=EventType.MESSAGE_RECEIVED, message_id="m"))
        tx.events.add(CHAT, NewEvent(type=EventType.MESSAGE_RECEIVED, message_id="n"))
        tx.events.name_turn(CHAT, message_id="m", turn_id="t")
    assert [event.turn_id for event in await _read(database)] == ["t", None]


async def test_the_end_of_a_turn_is_found(database: Database) -> None:
    async with database.begin() as tx:
        tx.events.add(CHAT, NewEvent(type=EventType.TURN_STARTED, turn_id="t"))
    async with database.read() as tx:
        assert await tx.events.end_of_turn("t") is None
    async with database.begin() as tx:
        tx.events.add(CHAT, NewEvent(type=EventType.TURN_ENDED, turn_id="t", data={"state": "done"}))
    async with database.read() as tx:
        end = await tx.events.end_of_turn("t")
        assert [event.type for event in await tx.events.of_turn("t")] == ["turn.started", "turn.ended"]
    assert end is not None and end.data == {"state": "done"}


class _GivenBackError(Exception):
    """Ends a transaction without a commit."""


async def test_a_reader_that_saw_a_number_has_seen_all_smaller_ones(database: Database) -> None:
    writers, each = 8, 12
    seen: list[int] = []
    is_done = asyncio.Event()

    async def write(writer: int) -> None:
        for n in range(each):
            with suppress(_GivenBackError):
                async with database.begin() as tx:
                    tx.events.add(CHAT, *_events(1 + (writer + n) % 3))
                    if n % 2:  # the number is given out long before the commit
                        await tx.flush()
                        for _ in range(writer):
                            await tx.chats.find("other")
                    if (writer + n) % 5 == 0:
                        raise _GivenBackError

    async def read() -> None:
        while True:
            is_last = is_done.is_set()
            page = await _read(database, seen[-1] if seen else 0, limit=7)
            seen.extend(event.number for event in page)
            if is_last and not page:
                return
            await asyncio.sleep(0)

    reader = asyncio.create_task(read())
    await asyncio.gather(*(write(writer) for writer in range(writers)))
    is_done.set()
    await reader
    # A number that became visible after a larger one was read would be missing here.
    assert seen == list(range(1, len(seen) + 1))
    async with database.read() as tx:
        assert await tx.events.newest_numbers([CHAT]) == {CHAT: len(seen)}


async def test_a_larger_number_is_not_given_out_before_the_smaller_one_is_committed(
    database: Database,
) -> None:
    holds, may_commit = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with database.begin() as tx:
            await tx.events.append(CHAT, _events(1, "first"))
            holds.set()
            await may_commit.wait()

    async def second() -> None:
        async with database.begin() as tx:
            tx.events.add(CHAT, *_events(1, "second"))

    one = asyncio.create_task(first())
    await holds.wait()
    two = asyncio.create_task(second())
    for _ in range(20):
        assert await _read(database) == []
        await asyncio.sleep(0.005)
    assert not two.done()
    may_commit.set()
    await asyncio.gather(one, two)
    found = await eventually(lambda: _read(database))
    assert [(event.number, event.type) for event in found] == [(1, "first"), (2, "second")]


async def test_expired_events_are_deleted_and_numbers_go_on(database: Database) -> None:
    old = datetime.now(UTC) - timedelta(days=9)
    async with database.begin() as tx:
        tx.events.add(CHAT, *(NewEvent(type="old", created_at=old) for _ in range(5)), *_events(1))
    deleted = await delete_expired(database, RetentionSettings(rounds_days=8), batch=2)
    assert deleted["chat_events"] == 5
    assert [event.number for event in await _read(database)] == [6]
    async with database.begin() as tx:
        tx.events.add(CHAT, *_events(1))
    assert [event.number for event in await _read(database, 6)] == [7]
