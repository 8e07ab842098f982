"""``plugin.store``: the plugin API above the storage port."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger

from nekro_agent.errors import InvalidValueError, RuntimeNotBoundError
from nekro_agent.plugin import NekroPlugin
from nekro_agent.runtime import StorePolicy
from nekro_agent.testing import InMemoryRuntime

keys = st.text(max_size=200)
names = st.text(min_size=1, max_size=200)


async def test_set_and_delete_return_the_documented_values(
    world: InMemoryRuntime, plugin: NekroPlugin
) -> None:
    assert await plugin.store.set(store_key="k", value="1") == 0
    assert await plugin.store.set(store_key="k", value="2") == 1
    assert await plugin.store.get(store_key="k") == "2"
    assert await plugin.store.delete(store_key="k") == 0
    assert await plugin.store.delete(store_key="k") == 1
    assert await plugin.store.get(store_key="k") is None


async def test_arguments_may_be_positional(world: InMemoryRuntime, plugin: NekroPlugin) -> None:
    assert await plugin.store.set("chat", "user", "key", "value") == 0
    assert await plugin.store.get("chat", "user", "key") == "value"
    assert await plugin.store.get("chat", "", "key") is None
    assert await plugin.store.delete("chat", "user", "key") == 0


@given(chat=keys, user=keys, key=names, value=st.text(max_size=500), other=st.tuples(keys, keys, names))
@settings(max_examples=80)
async def test_any_text_is_a_key_and_a_value_and_scopes_are_exact(
    chat: str, user: str, key: str, value: str, other: tuple[str, str, str]
) -> None:
    plugin = NekroPlugin("p", "p", "", "1", "Ada", "")
    async with InMemoryRuntime(plugin):
        await plugin.store.set(chat_key=chat, user_key=user, store_key=key, value=value)
        assert await plugin.store.get(chat_key=chat, user_key=user, store_key=key) == value
        found = await plugin.store.get(*other)
        assert found == (value if other == (chat, user, key) else None)


@pytest.mark.parametrize("scope", [{"user_key": None}, {"chat_key": None}])
async def test_an_unknown_scope_is_refused_instead_of_used_globally(
    world: InMemoryRuntime, plugin: NekroPlugin, scope: dict[str, Any]
) -> None:
    await plugin.store.set(store_key="k", value="global")
    assert await plugin.store.get(**scope, store_key="k") is None
    assert await plugin.store.delete(**scope, store_key="k") == 1
    with pytest.raises(InvalidValueError, match="is None, so the scope is unknown"):
        await plugin.store.set(**scope, store_key="k", value="x")
    assert await plugin.store.get(store_key="k") == "global"


@pytest.mark.parametrize(("value", "text"), [(3, "3"), (2.5, "2.5"), (True, "True")])
async def test_numbers_are_stored_as_text(
    world: InMemoryRuntime, plugin: NekroPlugin, value: Any, text: str
) -> None:
    await plugin.store.set(store_key="k", value=value)
    assert await plugin.store.get(store_key="k") == text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"store_key": "k", "value": None}, "value of 'k' must be a string, not NoneType"),
        ({"store_key": "k", "value": b"x"}, "not bytes; use json.dumps"),
        ({"store_key": "k", "value": {"a": 1}}, "not dict"),
        ({"store_key": "", "value": "x"}, "store_key is empty"),
        ({"store_key": 7, "value": "x"}, "store_key must be a string, not int"),
        ({"store_key": "k" * 1025, "value": "x"}, "store_key has 1025 characters, the limit is 1024"),
        ({"store_key": "k", "chat_key": "c" * 1025, "value": "x"}, "chat_key has 1025 characters"),
        ({"store_key": "k", "value": "あ" * 400}, "has 1200 bytes, the limit is 1000"),
    ],
)
async def test_invalid_arguments_are_named(arguments: dict[str, Any], reason: str) -> None:
    plugin = NekroPlugin("p", "p", "", "1", "Ada", "")
    async with InMemoryRuntime(plugin, store_policy=StorePolicy(max_value_bytes=1000)):
        with pytest.raises(InvalidValueError, match=reason):
            await plugin.store.set(**arguments)


async def test_the_store_at_import_time_raises_with_the_reason(plugin: NekroPlugin) -> None:
    with pytest.raises(RuntimeNotBoundError, match="not at import time"):
        await plugin.store.get(store_key="k")


async def test_a_large_value_is_stored_with_a_warning_and_a_larger_one_refused(
    world: InMemoryRuntime, plugin: NekroPlugin
) -> None:
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(message.record["message"]), level="WARNING")
    try:
        await plugin.store.set(store_key="fits", value="x" * ((1 << 20) - 1))
        assert warnings == []
        assert await plugin.store.set(store_key="big", value="é" * (1 << 19)) == 0
        assert warnings == ["store_value_large"]
        with pytest.raises(InvalidValueError, match=r"limit is \d+ for values"):
            await plugin.store.set(store_key="huge", value="x" * (StorePolicy().max_value_bytes + 1))
    finally:
        logger.remove(sink)
    assert await plugin.store.get(store_key="huge") is None
