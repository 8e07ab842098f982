"""Queries of chats, messages and stored values by plugins, on each implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from runtime_bench import RecordingPublisher, emptied

from broker_config.settings import StoreSettings
from nekro_agent.execution.current import effects_of
from nekro_agent.ports import KeyValueStore, MessageKind, Messages, OutgoingMessage
from nekro_agent.records import Records
from storage.kv import SqlKeyValueStore
from workers.sdk_runtime import SqlMessages, SqlRecords


@dataclass
class Services:
    records: Records
    messages: Messages
    store: KeyValueStore


@pytest.fixture(params=["sqlite", "postgres"])
async def services(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Services]:
    database = await emptied(request.getfixturevalue("migrated")(request.param), tmp_path)
    recorder = RecordingPublisher()
    yield Services(
        SqlRecords(database, recorder),
        SqlMessages(database, recorder),
        SqlKeyValueStore(database, StoreSettings()),
    )
    await recorder.close()
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


async def test_people_are_added_changed_and_deleted(services: Services) -> None:
    records = services.records
    ada = await records.change_user("onebot_v11", "7", {"username": "Ada"})
    other = await records.change_user("discord", "7", {"username": "Ada"})
    assert ada.id != other.id and ada.may_trigger(datetime.now(UTC))
    later = datetime.now(UTC) + timedelta(hours=1)
    changed = await records.change_user("onebot_v11", "7", {"ban_until": later, "ext_data": {"a": [1, None]}})
    assert (changed.id, changed.username, changed.ban_until) == (ada.id, "Ada", later)
    assert changed.ext_data == {"a": [1, None]} and not changed.may_trigger(datetime.now(UTC))
    assert changed.may_trigger(later + timedelta(seconds=1))
    assert await records.users(platform_userid="7", limit=9) == [changed, other]
    assert await records.users(platform_userid=None, limit=1) == [changed]
    assert await records.delete_user(ada.id) and not await records.delete_user(ada.id)
    assert await records.users(platform_userid="7", limit=9) == [other]


async def test_presets_are_added_changed_and_deleted(services: Services) -> None:
    records = services.records
    made = await records.add_preset({"name": "Pirate", "content": "Arr."})
    assert (made.title, made.on_shared, made.remote_id) == ("", False, None)
    assert await records.change_preset(made.id, {"content": "Ahoy.", "ext_data": {"x": 1}})
    (found,) = await records.presets(preset_id=made.id, limit=9)
    assert (found.name, found.content, found.ext_data) == ("Pirate", "Ahoy.", {"x": 1})
    assert await records.presets(preset_id=None, limit=9) == [found]
    assert await records.delete_preset(made.id) and not await records.delete_preset(made.id)
    assert not await records.change_preset(made.id, {"content": "x"})


async def test_a_repeated_call_adds_its_presets_once(services: Services) -> None:
    records = services.records

    async def attempt(count: int) -> list[int]:
        with effects_of("call"):
            return [(await records.add_preset({"name": "Pirate"})).id for _ in range(count)]

    first, second = [await attempt(count) for count in (2, 3)]
    assert len(set(first)) == 2
    assert second[:2] == first, "what the first attempt added is not added again"
    assert len(await records.presets(preset_id=None, limit=9)) == 3
    others = {(await records.add_preset({"name": "Pirate"})).id for _ in range(2)}
    assert len(await records.presets(preset_id=None, limit=9)) == 5 and others.isdisjoint(first)


async def test_chats_are_changed(services: Services) -> None:
    records = services.records
    chat = await records.change_chat("onebot_v11-group_1", {"preset_id": 5, "is_active": False})
    assert (chat.adapter_key, chat.channel_type, chat.preset_id) == ("onebot_v11", "group", 5)
    assert not chat.starts_turns
    chat = await records.change_chat("onebot_v11-group_1", {"is_active": True, "observe_mode": True})
    assert (chat.preset_id, chat.is_active, chat.starts_turns) == (5, True, False)
    await records.reset_chat("onebot_v11-group_1")
    (again,) = await records.chats(chat_key="onebot_v11-group_1", limit=1)
    assert again.reset_at is not None


async def test_messages_are_added_once_changed_and_deleted(services: Services) -> None:
    records = services.records
    add = partial(records.add_message, "onebot_v11-private_1", kind=MessageKind.USER, message_id="m")
    row = await add(text="hi", sender_id="7", sender_name="Ada", data={"is_tome": 0})
    assert (row.adapter_key, row.channel_type, row.data) == ("onebot_v11", "private", {"is_tome": 0})
    assert (await add(text="twice")).text == "hi"
    assert await records.change_message("m", {"text": "ho", "data": {"is_recalled": True}})
    (changed,) = await records.messages(chat_key="onebot_v11-private_1", since=None, limit=9)
    assert (changed.text, changed.data, changed.sender_name) == ("ho", {"is_recalled": True}, "Ada")
    assert await records.delete_message("m") and not await records.delete_message("m")
    assert not await records.change_message("m", {"text": "x"})
    assert await records.messages(chat_key="onebot_v11-private_1", since=None, limit=9) == []
