"""What every key-value store promises to plugins, checked on each implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker_config.settings import StoreSettings
from nekro_agent.ports import KeyValueStore
from storage.engine import Database
from storage.kv import SqlKeyValueStore

SCOPE: dict[str, str] = {"chat_key": "", "user_key": "", "store_key": "k"}
TEXT = st.text(max_size=60)


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KeyValueStore]:
    database = Database(request.getfixturevalue("migrated_copy")(request.param), tmp_path)
    yield SqlKeyValueStore(database, StoreSettings())
    await database.dispose()


async def test_missing_value_is_none(store: KeyValueStore) -> None:
    assert await store.get("a.b", **SCOPE) is None


async def test_set_reports_whether_the_key_was_new(store: KeyValueStore) -> None:
    assert await store.set("a.b", **SCOPE, value="1") is True
    assert await store.set("a.b", **SCOPE, value="2") is False
    assert await store.get("a.b", **SCOPE) == "2"


async def test_delete_reports_whether_the_key_existed_and_set_is_new_again(store: KeyValueStore) -> None:
    await store.set("a.b", **SCOPE, value="1")
    assert await store.delete("a.b", **SCOPE) is True
    assert await store.delete("a.b", **SCOPE) is False
    assert await store.get("a.b", **SCOPE) is None
    assert await store.set("a.b", **SCOPE, value="1") is True


async def test_scopes_and_plugins_are_separate(store: KeyValueStore) -> None:
    scopes = [
        ("a.b", "", "", "x"), ("a.b", "x", "", "x"), ("a.b", "", "x", "x"), ("a.b", "x", "x", "x"),
        ("a.b", "xx", "", "x"), ("a.b", "x", "", "xx"), ("a.c", "x", "", "x"), ("a", ".bx", "", "x"),
    ]  # fmt: skip
    for number, (plugin, chat, user, key) in enumerate(scopes):
        assert await store.set(plugin, chat_key=chat, user_key=user, store_key=key, value=str(number))
    values = [await store.get(p, chat_key=c, user_key=u, store_key=k) for p, c, u, k in scopes]
    assert values == [str(number) for number in range(len(scopes))]


async def test_purge_deletes_all_values_of_one_plugin(store: KeyValueStore) -> None:
    for user in ("", "1", "2"):
        await store.set("a.b", chat_key="c", user_key=user, store_key="k", value="v")
    await store.set("a.bb", **SCOPE, value="stays")
    assert await store.purge("a.b") == 3
    assert await store.purge("a.b") == 0
    assert await store.get("a.bb", **SCOPE) == "stays"


async def test_hundred_concurrent_sets_of_one_key_report_one_creation(store: KeyValueStore) -> None:
    created = await asyncio.gather(*(store.set("a.b", **SCOPE, value=str(n)) for n in range(100)))
    assert created.count(True) == 1
    assert await store.get("a.b", **SCOPE) in {str(n) for n in range(100)}
    assert await store.purge("a.b") == 1


async def test_thousand_concurrent_calls_all_succeed(store: KeyValueStore) -> None:
    async def one(number: int) -> str | None:
        key = {"chat_key": "c", "user_key": "", "store_key": str(number)}
        await store.set("a.b", **key, value=str(number))
        return await store.get("a.b", **key)

    assert await asyncio.gather(*(one(n) for n in range(500))) == [str(n) for n in range(500)]


@settings(max_examples=25)
@given(chat_key=TEXT, user_key=TEXT, store_key=st.text(min_size=1, max_size=128), value=st.text())
async def test_any_text_is_stored_unchanged(
    store: KeyValueStore, chat_key: str, user_key: str, store_key: str, value: str
) -> None:
    scope = {"chat_key": chat_key, "user_key": user_key, "store_key": store_key}
    await store.set("a.b", **scope, value=value)
    assert await store.get("a.b", **scope) == value


@pytest.mark.parametrize("key", ["a\0b", "k" * 1024, "😀" * 1024, "a%00", "../../x", "'; --"])
async def test_unusual_keys_are_ordinary_keys(store: KeyValueStore, key: str) -> None:
    scope = {"chat_key": key, "user_key": key, "store_key": key}
    assert await store.set("a.b", **scope, value=f"{key}\0") is True
    assert await store.get("a.b", **scope) == f"{key}\0"
    assert await store.delete("a.b", **scope) is True
