"""Queries across chats and plugins."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from broker_config.settings import StoreSettings
from nekro_agent.ports import MessageKind
from storage.engine import Database
from storage.kv import SqlKeyValueStore
from storage.repositories.messages import NewMessage


async def test_messages_of_one_or_all_chats_are_newest_first(database: Database) -> None:
    async with database.begin() as tx:
        await tx.chats.ensure("a", adapter_key="onebot_v11")
        await tx.chats.ensure("b")
        for number, chat in enumerate(["a", "b", "a"]):
            await tx.messages.append(
                NewMessage(chat_key=chat, kind=MessageKind.USER, text=str(number), sender_id="7")
            )
        every = await tx.records.messages(chat_key=None, since=None, limit=9)
        assert [message.text for message in every] == ["2", "1", "0"]
        assert (every[0].adapter_key, every[1].adapter_key, every[0].sender_id) == ("onebot_v11", None, "7")
        assert await tx.records.messages(chat_key="a", since=None, limit=1) == every[:1]
        past, future = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))
        assert len(await tx.records.messages(chat_key="a", since=past, limit=9)) == 2
        assert await tx.records.messages(chat_key="a", since=future, limit=9) == []
        assert len(await tx.records.chats(chat_key=None, limit=9)) == 2
        assert [chat.chat_key for chat in await tx.records.chats(chat_key="a", limit=9)] == ["a"]
        assert await tx.records.chats(chat_key="c", limit=9) == []


async def test_plugin_values_are_filtered_by_the_given_fields(database: Database) -> None:
    store = SqlKeyValueStore(database, StoreSettings())
    for plugin, chat, key in [("a.b", "", "k"), ("a.b", "c", "k"), ("a.b", "c", "l"), ("a.c", "c", "k\0")]:
        await store.set(plugin, chat_key=chat, user_key="", store_key=key, value=f"{plugin}{chat}{key}")

    async def values(**narrow: str) -> list[str]:
        given: dict[str, str | None] = {"plugin_key": None, "store_key": None, "chat_key": None, **narrow}
        async with database.read() as tx:
            found = await tx.records.plugin_values(
                plugin_key=given["plugin_key"],
                store_key=given["store_key"],
                chat_key=given["chat_key"],
                limit=9,
            )
        return sorted(value.value for value in found)

    assert await values() == ["a.bck", "a.bcl", "a.bk", "a.cck\0"]
    assert await values(plugin_key="a.b", store_key="k") == ["a.bck", "a.bk"]
    assert await values(chat_key="", plugin_key="a.b") == ["a.bk"]
    assert await values(store_key="k\0") == ["a.cck\0"]
