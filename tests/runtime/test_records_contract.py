"""Queries of chats, messages and stored values by plugins, on each implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from runtime_bench import RecordingPublisher, emptied

from broker_config.settings import StoreSettings
from nekro_agent.ports import KeyValueStore, MessageKind, Messages, OutgoingMessage
from nekro_agent.records import Records
from nekro_agent.testing import InMemoryRuntime
from storage.kv import SqlKeyValueStore
from workers.chats.messages import SqlMessages
from workers.chats.records import SqlRecords


@dataclass
class Services:
    records: Records
    messages: Messages
    store: KeyValueStore


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def services(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Services]:
    if request.param == "memory":
        async with InMemoryRuntime(data_dir=tmp_path) as world:
            yield Services(world.records, world.messages, world.store)
        return
    database = await emptied(request.getfixturevalue("migrated")(request.param), tmp_path)
    recorder = RecordingPublisher()
    yield Services(
        SqlRecords(database, recorder),
        SqlMessages(database, recorder),
        SqlKeyValueStore(database, StoreSettings()),
    )
    recorder.close()
    await database.dispose()


async def test_messages_are_filtered_and_newest_first(services: Services) -> None:
    begun = datetime.now(UTC)
    await services.messages.push_system("a", "one", trigger_agent=False, call_id=None)
    await services.messages.send(OutgoingMessage(chat_key="b", text="two"))
    await services.messages.send(OutgoingMessage(chat_key="a", text="three"))
    every = await services.records.messages(chat_key=None, since=None, limit=9)
    assert [row.text for row in every] == ["three", "two", "one"]
    assert [row.kind for row in every] == [MessageKind.ASSISTANT, MessageKind.ASSISTANT, MessageKind.SYSTEM]
    assert every[0].sequence > every[1].sequence > every[2].sequence
    of_a = await services.records.messages(chat_key="a", since=None, limit=9)
    assert [row.text for row in of_a] == ["three", "one"]
    assert await services.records.messages(chat_key="a", since=None, limit=1) == of_a[:1]
    hour = timedelta(hours=1)
    assert len(await services.records.messages(chat_key=None, since=begun - hour, limit=9)) == 3
    assert await services.records.messages(chat_key=None, since=begun + hour, limit=9) == []


async def test_chats_with_messages_are_listed(services: Services) -> None:
    for chat_key in ("a", "b"):
        await services.messages.push_system(chat_key, "hello", trigger_agent=False, call_id=None)
    chats = await services.records.chats(chat_key=None, limit=9)
    assert {chat.chat_key for chat in chats} == {"a", "b"}
    assert [chat.chat_key for chat in await services.records.chats(chat_key="b", limit=9)] == ["b"]
    assert await services.records.chats(chat_key="c", limit=9) == []
    assert len(await services.records.chats(chat_key=None, limit=1)) == 1


async def test_stored_values_are_filtered_by_the_given_fields(services: Services) -> None:
    for plugin, chat, key in [("a.b", "", "k"), ("a.b", "c", "k"), ("a.b", "c", "l"), ("a.c", "c", "k")]:
        await services.store.set(
            plugin, chat_key=chat, user_key="", store_key=key, value=f"{plugin}/{chat}/{key}"
        )

    async def found(
        plugin_key: str | None = None, store_key: str | None = None, chat_key: str | None = None
    ) -> set[str]:
        values = await services.records.plugin_values(
            plugin_key=plugin_key, store_key=store_key, chat_key=chat_key, limit=9
        )
        return {value.value for value in values}

    assert await found() == {"a.b//k", "a.b/c/k", "a.b/c/l", "a.c/c/k"}
    assert await found(plugin_key="a.b", store_key="k") == {"a.b//k", "a.b/c/k"}
    assert await found(chat_key="") == {"a.b//k"}
    assert await found(plugin_key="a.c", chat_key="c") == {"a.c/c/k"}
    assert await found(store_key="none") == set()
