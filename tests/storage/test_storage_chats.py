"""Chats, their leases, and leases by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from forked_code import forked
from sqlalchemy import text

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import FencedError, InvalidValueError, NotFoundError
from nekro_agent.ports import MessageKind
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.repositories.chats import CHAT_LEASES
from storage.repositories.leases import NAMED_LEASES, LeaseTable
from storage.repositories.messages import NewMessage
from storage.transaction import Transaction

RunOut = Callable[[], Awaitable[None]]
CHAT = "onebot_v11-group:1/2"

#: Acquires one chat's lease and one named lease alternately, and counts without atomic increments.
CONTENDER = """
import asyncio, sys
from pathlib import Path
from sqlalchemy import text
from broker_config.settings import DatabaseSettings
from storage.engine import Database

async def turn(database, name):
    async with database.begin() as tx:
        fence = await tx.chats.acquire("chat", owner=name, lease_seconds=30)
    if fence is None:
        return False
    async with database.read() as tx:
        rows = await tx.connection.execute(text("SELECT fence FROM leases WHERE name='counter'"))
    count = rows.scalar_one()
    await asyncio.sleep(0)
    async with database.begin() as tx:
        await tx.chats.hold("chat", fence=fence)
        await tx.connection.execute(
            text("UPDATE leases SET fence = :c WHERE name='counter'"), {"c": count + 1}
        )
        await tx.chats.release("chat", fence=fence)
    return True

async def main(url, name):
    database = Database(DatabaseSettings(url=url), Path())
    done = 0
    while done < 15:
        done += await turn(database, name)
    await database.dispose()

sys.stdin.readline()
asyncio.run(main(*sys.argv[1:]))
"""


async def test_chat_is_created_once_with_a_container_key_that_names_a_directory(
    database: Database, tmp_path: object
) -> None:
    async with database.begin() as tx:
        chat = await tx.chats.ensure(CHAT, adapter_key="onebot_v11", channel_id="group:1/2")
        again = await tx.chats.ensure(CHAT)
    assert again == chat
    assert (chat.chat_key, chat.adapter_key, chat.channel_id) == (CHAT, "onebot_v11", "group:1/2")
    assert chat.created_at is not None and chat.created_at.tzinfo is not None
    DataAreas(tmp_path).shared_dir(chat.container_key)  # type: ignore[arg-type]
    async with database.read() as tx:
        assert await tx.chats.get(CHAT) == chat


async def test_concurrent_callers_agree_on_the_container_key(database: Database) -> None:
    async def ensure() -> str:
        async with database.begin() as tx:
            return (await tx.chats.ensure(CHAT)).container_key

    assert len(set(await asyncio.gather(*(ensure() for _ in range(20))))) == 1


async def test_given_fields_are_replaced_and_none_keeps_the_known_ones(database: Database) -> None:
    async with database.begin() as tx:
        before = await tx.chats.ensure(CHAT, adapter_key="a", channel_name="old")
        after = await tx.chats.ensure(CHAT, channel_name="new")
    assert (after.adapter_key, after.channel_name) == ("a", "new")
    assert after.container_key == before.container_key


@pytest.mark.parametrize("chat_key", ["k" * 200, "聊天:😀/" * 20, "a\0b\ud800", "'; DROP TABLE chats"])
async def test_any_platform_s_chat_key_works(database: Database, chat_key: str) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure(chat_key)
        assert (await tx.chats.get(chat_key)).chat_key == chat_key


async def test_overlong_chat_key_is_refused_with_its_size(database: Database) -> None:
    with pytest.raises(InvalidValueError, match="5000 bytes; the limit is 1250"):
        async with database.begin() as tx:
            await tx.chats.ensure("k" * 5000)


async def test_missing_chat_is_none_for_find_and_an_error_for_get(database: Database) -> None:
    async with database.begin() as tx:
        assert await tx.chats.find("no") is None
        with pytest.raises(NotFoundError, match="'no'"):
            await tx.chats.get("no")
        with pytest.raises(NotFoundError, match="no chat"):
            await tx.chats.lock("no")


async def renewed(tx: Transaction, table: LeaseTable, key: str, fence: int) -> bool:
    """Whether a lease could be renewed."""
    renewal = await tx.leases.renew(table, [(key, fence)], lease_seconds=30)
    return bool(renewal.kept)


async def test_chat_has_one_holder_at_a_time_and_each_has_a_higher_fence(database: Database) -> None:
    async with database.begin() as tx:
        assert await tx.chats.acquire(CHAT, owner="a", lease_seconds=30) is None  # no row yet
        await tx.chats.ensure(CHAT)
        assert await tx.chats.acquire(CHAT, owner="a", lease_seconds=30) == 1
        assert await tx.chats.acquire(CHAT, owner="a", lease_seconds=30) is None
        assert await tx.chats.acquire(CHAT, owner="b", lease_seconds=30) is None
        assert await renewed(tx, CHAT_LEASES, CHAT, 1)
        assert await tx.chats.release(CHAT, fence=1)
        assert not await renewed(tx, CHAT_LEASES, CHAT, 1)
        assert await tx.chats.acquire(CHAT, owner="b", lease_seconds=30) == 2


async def test_holder_that_lost_its_lease_cannot_act_on_it(
    database: Database, let_leases_run_out: RunOut
) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure(CHAT)
        old = await tx.chats.acquire(CHAT, owner="frozen", lease_seconds=30)
    assert old is not None
    await let_leases_run_out()
    async with database.begin() as tx:
        await tx.chats.hold(CHAT, fence=old)  # expired, but not taken by another holder
        new = await tx.chats.acquire(CHAT, owner="next", lease_seconds=30)
        assert new == old + 1
        with pytest.raises(FencedError, match=f"lease {old}"):
            await tx.chats.hold(CHAT, fence=old)
        assert not await renewed(tx, CHAT_LEASES, CHAT, old)
        assert not await tx.chats.release(CHAT, fence=old)
        await tx.chats.hold(CHAT, fence=new)


async def test_expired_lease_can_be_renewed_while_it_is_free(
    database: Database, let_leases_run_out: RunOut
) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure(CHAT)
        await tx.chats.acquire(CHAT, owner="a", lease_seconds=30)
    await let_leases_run_out()
    async with database.begin() as tx:
        assert await renewed(tx, CHAT_LEASES, CHAT, 1)
        assert await tx.chats.acquire(CHAT, owner="b", lease_seconds=30) is None


async def test_named_lease_has_one_holder_at_a_time(database: Database, let_leases_run_out: RunOut) -> None:
    async def acquire(owner: str) -> int | None:
        async with database.autocommit() as tx:
            return await tx.leases.acquire("sweeper", owner=owner, lease_seconds=30)

    fences = await asyncio.gather(*(acquire(f"w{number}") for number in range(10)))
    assert sorted(fence for fence in fences if fence) == [1]
    async with database.begin() as tx:
        (held,) = await tx.leases.held(prefix="sweep", limit=9)
        assert (held.name, held.fence) == ("sweeper", 1)
        assert await renewed(tx, NAMED_LEASES, "sweeper", 1)
        assert not await renewed(tx, NAMED_LEASES, "sweeper", 2)
    await let_leases_run_out()
    async with database.begin() as tx:
        assert await tx.leases.held(prefix="sweep", limit=9) == []
        assert await tx.leases.acquire("sweeper", owner="next", lease_seconds=30) == 2
        assert not await tx.leases.release("sweeper", fence=1)
        assert await tx.leases.release("sweeper", fence=2)
        assert await tx.leases.acquire("sweeper", owner="third", lease_seconds=30) == 3


async def test_competing_processes_never_hold_a_lease_together(
    database: Database, migrated_settings: DatabaseSettings
) -> None:
    assert migrated_settings.url is not None
    async with database.begin() as tx:
        await tx.chats.ensure("chat")
        await tx.connection.execute(text("INSERT INTO leases (name, fence) VALUES ('counter', 0)"))
    processes = [
        forked(CONTENDER, migrated_settings.url, f"p{number}", has_stdin=True) for number in range(2)
    ]
    await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    assert [process.returncode for process in processes] == [0, 0]
    async with database.read() as tx:
        counted = (
            await tx.connection.execute(text("SELECT fence FROM leases WHERE name='counter'"))
        ).scalar_one()
        assert counted == 30


async def test_a_chat_keeps_its_model_group(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure(CHAT)
        await tx.chats.use_model_group(CHAT, "cheap")
    async with database.read() as tx:
        assert (await tx.chats.get(CHAT)).model_group == "cheap"
    with pytest.raises(NotFoundError):
        async with database.begin() as tx:
            await tx.chats.use_model_group("nowhere", "cheap")


async def test_a_chat_is_listed_with_its_given_title_and_the_first_words_of_a_person(
    database: Database,
) -> None:
    words = "\x00 \ud800 first " * 200  # characters that are stored as escapes
    for chat_key in ("one", "two"):
        async with database.begin() as tx:
            await tx.chats.ensure(chat_key)
    async with database.begin() as tx:
        for kind, said in (
            (MessageKind.ASSISTANT, "Hello"), (MessageKind.USER, ""), (MessageKind.USER, words),
            (MessageKind.USER, "second"),
        ):  # fmt: skip
            await tx.messages.append(NewMessage(chat_key="one", kind=kind, text=said))
    async with database.begin() as tx:
        await tx.messages.append(NewMessage(chat_key="two", kind=MessageKind.ASSISTANT, text="Hello"))
        await tx.chats.give_title("two", "Title \x00")
    async with database.read() as tx:
        found = await tx.chat_listing.first_words(["one", "two", "none"])
        assert list(found) == ["one"] and words.startswith(found["one"][:100]) and len(found["one"]) <= 1000
        assert await tx.chat_listing.first_words([]) == {}
        two = await tx.chat_listing.find("two")
        assert two is not None and two.title == "Title \x00" == (await tx.chats.get("two")).title
        assert [chat.chat_key for chat in await tx.chat_listing.page(limit=9, text="title")] == ["two"]
        assert await tx.chat_listing.find("none") is None
    with pytest.raises(NotFoundError):
        async with database.begin() as tx:
            await tx.chats.give_title("none", "x")
