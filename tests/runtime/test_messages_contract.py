"""What ``Messages`` promises to plugins, checked on each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from runtime_bench import RecordingPublisher, emptied

from nekro_agent.errors import InvalidValueError
from nekro_agent.ports import MOST_TEXT_CHARS, MessageKind, Messages, OutgoingMessage
from nekro_agent.records import Records
from storage.engine import Database
from workers.rounds.chat_view import ChatHistory
from workers.sdk_runtime import SqlMessages, SqlRecords


@dataclass
class Port:
    """One implementation."""

    messages: Messages
    records: Records
    #: Chats whose agent was woken, in order.
    woken: Callable[[], list[str]]

    async def texts(self, chat_key: str) -> list[tuple[MessageKind, str]]:
        """Kinds and texts of a chat's history, oldest first."""
        rows = await self.records.messages(chat_key=chat_key, since=None, limit=100)
        return [(row.kind, row.text) for row in reversed(rows)]


@pytest.fixture(params=["sqlite", "postgres"])
async def port(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Port]:
    database = await emptied(request.getfixturevalue("migrated")(request.param), tmp_path)
    recorder = RecordingPublisher()
    yield Port(SqlMessages(database, recorder), SqlRecords(database, recorder), lambda: recorder.rounds)
    await recorder.close()
    await database.dispose()


async def test_message_is_in_the_history_when_send_returns(port: Port) -> None:
    first = await port.messages.send(OutgoingMessage(chat_key="a", text="one"))
    assert await port.texts("a") == [(MessageKind.ASSISTANT, "one")]
    second = await port.messages.send(OutgoingMessage(chat_key="b", text="two"))
    assert first != second
    assert await port.texts("a") == [(MessageKind.ASSISTANT, "one")]
    assert port.woken() == []


async def test_system_message_wakes_the_agent_only_on_request(port: Port) -> None:
    await port.messages.push_system("a", "quiet", trigger_agent=False, call_id=None)
    assert port.woken() == []
    await port.messages.push_system("a", "loud", trigger_agent=True, call_id=None)
    assert port.woken() == ["a"]
    assert await port.texts("a") == [(MessageKind.SYSTEM, "quiet"), (MessageKind.SYSTEM, "loud")]


async def test_a_text_that_is_too_long_is_refused(port: Port) -> None:
    longest = "é" * MOST_TEXT_CHARS
    await port.messages.send(OutgoingMessage(chat_key="a", text=longest))
    for message in (
        port.messages.send(OutgoingMessage(chat_key="a", text=f"{longest}!")),
        port.messages.push_system("a", f"{longest}!", trigger_agent=True, call_id=None),
        port.records.add_message("a", kind=MessageKind.USER, text=f"{longest}!"),
        port.records.add_message("a", kind=MessageKind.USER, text="t", sender_name="n" * 513),
        port.records.add_message("a", kind=MessageKind.USER, text="t", data={"key": "d" * (1 << 20)}),
    ):
        with pytest.raises(InvalidValueError, match="at most"):
            await message
    assert await port.texts("a") == [(MessageKind.ASSISTANT, longest)]
    assert port.woken() == []


async def test_agent_is_woken_without_a_message(port: Port) -> None:
    await port.messages.wake("a")
    assert port.woken() == ["a"]
    assert await port.texts("a") == []


async def test_concurrent_messages_are_all_recorded_in_one_order(port: Port) -> None:
    texts = [f"message {number}" for number in range(20)]
    ids = await asyncio.gather(
        *(port.messages.send(OutgoingMessage(chat_key="a", text=text)) for text in texts)
    )
    assert len(set(ids)) == 20
    rows = await port.records.messages(chat_key="a", since=None, limit=100)
    assert sorted(row.text for row in rows) == sorted(texts)
    sequences = [row.sequence for row in rows]
    assert sequences == sorted(set(sequences), reverse=True)


async def test_subscriber_that_reads_at_each_announcement_gets_everything_in_order(
    database: Database, recorder: RecordingPublisher
) -> None:
    """The announcement follows the rows, so a reader that gets it finds the event."""
    messages, seen = SqlMessages(database, recorder), list[tuple[str, str]]()
    for number in range(10):
        await messages.send(OutgoingMessage(chat_key="a", text=f"{number}"))
        assert recorder.events[-1] == f"a {number + 1}"
        async with database.read() as tx:
            rows = await tx.events.after("a", number=len(seen), limit=100)
        seen += [(row.type, row.data["text"]) for row in rows]
        assert seen == [("message.sent", f"{earlier}") for earlier in range(number + 1)]


async def test_model_does_not_see_unrecorded_messages(
    database: Database, recorder: RecordingPublisher
) -> None:
    messages = SqlMessages(database, recorder)
    await messages.send(OutgoingMessage(chat_key="a", text="for people", record=False))
    await messages.send(OutgoingMessage(chat_key="a", text="for both"))
    async with database.read() as tx:
        rows = await tx.messages.newest("a", limit=10)
        history = await ChatHistory("a", most=10).read(tx, revision=0, begins_turn=True)
    assert [row.text for row in rows] == [
        "for people",
        "for both",
    ]  # an adapter that delivers messages gets both
    assert [message.text for message in history] == ["for both"]
