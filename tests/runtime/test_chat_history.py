"""A drain's cached history equals the chat's messages, whatever happens between two rounds."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import delete

from nekro_agent.ports import MessageKind
from storage.engine import Database
from storage.repositories.messages import NewMessage
from storage.tables import MESSAGES
from storage.transaction import Transaction
from workers.rounds.chat_view import ChatHistory

MOST = 5


@pytest.fixture(autouse=True)
async def chat(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("c")


async def say(tx: Transaction, text: str, *, hidden: bool = False) -> None:
    await tx.messages.append(
        NewMessage(chat_key="c", kind=MessageKind.USER, text=text, data={"hidden": True} if hidden else None)
    )


async def say_much(tx: Transaction) -> None:
    for number in range(MOST + 2):
        await say(tx, f"much {number}")


async def delete_all(tx: Transaction) -> None:
    """As the retention deletes old messages."""
    await tx.connection.execute(delete(MESSAGES).where(MESSAGES.c.chat_key == "c"))


async def delete_one(tx: Transaction) -> None:
    for message in (await tx.messages.newest("c", limit=MOST))[:2]:
        await tx.records.delete_message(message.id)


async def change_one(tx: Transaction) -> None:
    for message in (await tx.messages.newest("c", limit=MOST))[:1]:
        await tx.records.change_message(message.id, {"text": message.text + "!"})


async def nothing(tx: Transaction) -> None:
    pass


CHANGES: list[Callable[[Transaction], Awaitable[object]]] = [
    lambda tx: say(tx, "a"),
    lambda tx: say(tx, "unseen", hidden=True),
    lambda tx: tx.chats.reset("c"),
    delete_all,
    say_much,
    delete_one,
    change_one,
    nothing,
]


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(4))
async def test_incremental_reads_equal_a_complete_read(database: Database, seed: int) -> None:
    chance = random.Random(seed)
    history = ChatHistory("c", most=MOST)
    for _ in range(40):
        for change in chance.choices(CHANGES, weights=[8, 2, 1, 1, 1, 1, 1, 2], k=chance.randint(0, 3)):
            async with database.begin() as tx:
                await change(tx)
        async with database.read() as tx:
            revision = (await tx.chats.get("c")).history_revision
            cached = await history.read(tx, revision=revision, begins_turn=True)
            assert cached == await ChatHistory("c", most=MOST).read(tx, revision=revision, begins_turn=True)


async def test_a_round_rereads_the_last_message_and_no_older_one(
    database: Database, watch_statements: Callable[[Transaction], list[tuple[str, Any]]]
) -> None:
    history = ChatHistory("c", most=100)
    async with database.begin() as tx:
        for number in range(60):
            await say(tx, f"{number}")
        before = await history.read(tx, revision=0, begins_turn=True)
        last = (await tx.messages.newest("c", limit=1))[0]
        await say(tx, "new")
        assert [message.text for message in await tx.messages.newest("c", limit=9, since=last.sequence)] == [
            "59",
            "new",
        ]
        asked = watch_statements(tx)
        after = await history.read(tx, revision=0, begins_turn=True)
    assert [message.text for message in after] == [*(message.text for message in before), "new"]
    assert len(asked) == 1
    assert str(last.sequence) in str(asked[0][1])


async def test_the_first_messages_of_a_turn_stay_until_it_ends(database: Database) -> None:
    """A prompt that begins differently in each round would not be in an endpoint's prompt cache."""
    history = ChatHistory("c", most=MOST)
    async with database.begin() as tx:
        for number in range(MOST + 3):
            await say(tx, f"{number}")
        first = await history.read(tx, revision=0, begins_turn=True)
        assert len(first) == MOST
        for number in range(3):
            await say(tx, f"new {number}")
            later = await history.read(tx, revision=0, begins_turn=False)
            assert later[:MOST] == first
            assert [message.text for message in later[MOST:]] == [f"new {n}" for n in range(number + 1)]
        for number in range(MOST):
            await say(tx, f"flood {number}")
        flooded = await history.read(tx, revision=0, begins_turn=False)
        assert len(flooded) <= 2 * MOST
        assert len(await history.read(tx, revision=0, begins_turn=True)) == MOST
