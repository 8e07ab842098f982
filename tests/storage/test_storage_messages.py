"""A chat's messages: order, once-keys, and the part that the LLM is shown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from waiting import WAIT_SECONDS

from nekro_agent.errors import NotFoundError
from nekro_agent.ports import MessageKind
from storage.engine import Database
from storage.repositories.messages import Message, NewMessage


def _message(text: str = "hello", *, chat_key: str = "chat", **values: Any) -> NewMessage:
    return NewMessage(chat_key=chat_key, kind=values.pop("kind", MessageKind.USER), text=text, **values)


@pytest.fixture
async def chat(database: Database) -> str:
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        await tx.chats.ensure("other")
    return "chat"


async def _append(database: Database, *messages: NewMessage) -> list[Message]:
    async with database.begin() as tx:
        return [(await tx.messages.append(message))[0] for message in messages]


async def test_message_is_read_back_equal(database: Database, chat: str) -> None:
    new = _message(
        "a\0\ud800",
        sender_id="7",
        sender_name="Ann",
        data={"segments": [{"type": "text"}]},
        call_id="c",
        round_id="r",
        plugin_key="a.b",
        once_key="o",
    )
    (message,) = await _append(database, new)
    assert message.sequence > 0 and message.created_at.tzinfo is not None
    assert {name: getattr(message, name) for name in NewMessage.__dataclass_fields__} == vars(new)
    async with database.read() as tx:
        assert await tx.messages.find(new.id) == message
        assert await tx.messages.find("no") is None


async def test_newest_messages_are_returned_in_order_and_page_backwards(
    database: Database, chat: str
) -> None:
    await _append(database, *(_message(str(n)) for n in range(6)), _message("x", chat_key="other"))
    async with database.read() as tx:
        page = await tx.messages.newest(chat, limit=4)
        assert [message.text for message in page] == ["2", "3", "4", "5"]
        older = await tx.messages.newest(chat, limit=4, before=page[0].sequence)
        assert [message.text for message in older] == ["0", "1"]


async def test_reset_hides_earlier_messages_without_deleting_them(database: Database, chat: str) -> None:
    await _append(database, _message("before"), _message("elsewhere", chat_key="other"))
    async with database.begin() as tx:
        await tx.chats.reset(chat)
    await _append(database, _message("after"))
    async with database.read() as tx:
        assert [m.text for m in await tx.messages.newest(chat, limit=9)] == ["after"]
        assert [m.text for m in await tx.messages.newest(chat, limit=9, with_past=True)] == [
            "before",
            "after",
        ]
        assert [m.text for m in await tx.messages.newest("other", limit=9)] == ["elsewhere"]


async def test_observation_is_written_once_however_often_it_is_delivered(
    database: Database, chat: str
) -> None:
    async def deliver(number: int) -> bool:
        async with database.begin() as tx:
            message = _message(f"try {number}", kind=MessageKind.SYSTEM, once_key="observation:c1")
            kept, is_new = await tx.messages.append(message)
            assert is_new == (kept.id == message.id)
            return is_new

    assert sum(await asyncio.gather(*(deliver(number) for number in range(10)))) == 1
    async with database.read() as tx:
        assert len(await tx.messages.newest(chat, limit=20)) == 1


async def test_messages_without_a_once_key_may_repeat_and_an_id_may_not(
    database: Database, chat: str
) -> None:
    async with database.begin() as tx:
        first, _ = await tx.messages.append(_message())
        second, is_new = await tx.messages.append(_message())
        assert is_new and first.id != second.id
        again, is_new = await tx.messages.append(_message("changed", id=first.id))
        assert (again, is_new) == (first, False)


async def test_message_of_a_chat_without_a_row_is_refused(database: Database) -> None:
    with pytest.raises(NotFoundError, match="'nobody'"):
        await _append(database, _message(chat_key="nobody"))


async def test_reader_that_follows_sequences_misses_no_concurrent_message(
    database: Database, chat: str
) -> None:
    seen: list[Message] = []

    async def write(number: int) -> None:
        async with database.begin() as tx:
            message, _ = await tx.messages.append(_message(str(number)))
            # Leave time for another to commit between this one's number and its commit.
            for _ in range(number % 5):
                await asyncio.sleep(0)
            assert message.sequence

    async def follow() -> None:
        sequence = 0
        while len(seen) < 60:
            async with database.read() as tx:
                news = await tx.messages.after(chat, sequence=sequence, limit=100)
            seen.extend(news)
            sequence = seen[-1].sequence if seen else 0
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(follow())
        for number in range(60):
            group.create_task(write(number))
    assert sorted(int(message.text) for message in seen) == list(range(60))


async def test_the_number_of_a_deleted_message_is_not_used_again(database: Database, chat: str) -> None:
    (last,) = await _append(database, _message())
    async with database.begin() as tx:
        await tx.records.delete_message(last.id)
    (next_one,) = await _append(database, _message())
    assert next_one.sequence > last.sequence
