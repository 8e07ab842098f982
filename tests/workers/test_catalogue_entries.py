"""The catalogue's entries: their stored form, and arguments that are compared with parameters."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from celery.app.amqp import task_message

from broker_config.app import NekroApp
from broker_config.keys import Keys
from nekro.broker.delivery.messages import TaskMessage
from nekro.plugins.entries import PluginEntry, PluginStatus, digest_of
from nekro.plugins.entry_registry import refuse_unfit, refuse_unfit_text
from nekro.plugins.invoke import call_method
from nekro.plugins.registry import LoadedRegistry
from nekro.wire.values import encode_arguments
from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType
from nekro_agent.api.schemas import AgentCtx
from nekro_agent.errors import ArgumentError


async def plain(_ctx: AgentCtx, city: str, days: int = 3) -> str:
    return city * days


async def by_name(_ctx: AgentCtx, *, city: str, **more: Any) -> str:
    return city


async def any_number(_ctx: AgentCtx, *cities: str) -> str:
    return repr(cities)


async def by_position(_ctx: AgentCtx, city: str, /, days: int) -> str:
    return city


async def swapped(city: str, _ctx: AgentCtx, days: int = 1) -> str:
    return city


async def nothing(_ctx: AgentCtx) -> str:
    return ""


def registry_of(function: Callable[..., Any]) -> LoadedRegistry:
    plugin = NekroPlugin("P", "p", "", "1", "tests", "")
    plugin.mount_sandbox_method(SandboxMethodType.TOOL, "label")(function)
    return LoadedRegistry([plugin])


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    (("a",), {}),
    (("a", 2), {}),
    (("a", 2, 3), {}),
    ((), {"city": "a"}),
    ((), {"city": "a", "days": 2}),
    (("a",), {"city": "b"}),
    (("a",), {"unknown": 1}),
    (("a",), {"_ctx": 1}),
]


@pytest.mark.parametrize("function", [plain, by_name, any_number, by_position, swapped, nothing])
@pytest.mark.parametrize("call", CALLS)
async def test_a_caller_refuses_the_same_arguments_as_a_worker_with_the_same_words(
    function: Callable[..., Any], call: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    registry = registry_of(function)
    # As a caller has it: read from the stored form.
    (entry,) = PluginEntry.from_json(registry.plugins[0].to_json()).methods
    args, kwargs = call
    refusals = []
    for refuse in (
        lambda: refuse_unfit(entry, len(args), kwargs),
        lambda: refuse_unfit_text(entry, encode_arguments(args, kwargs)),
    ):
        try:
            refuse()
            refusals.append(None)
        except ArgumentError as exc:
            refusals.append(str(exc))
    try:
        await call_method(registry.loaded(entry).method, AgentCtx.for_call(chat_key="c"), args, kwargs)
        expected = None
    except ArgumentError as exc:
        expected = str(exc)
    assert refusals == [expected, expected]


@pytest.mark.parametrize(
    "text", ["", "[", "[1,2]", "[[],{},[]]", '[[],{"$dict":[["$a",1]]}]', "[" * 2000, '[[],["x"]]', "null"]
)
def test_what_a_caller_cannot_read_is_left_to_the_worker(text: str) -> None:
    (entry,) = registry_of(plain)
    refuse_unfit_text(entry, text)


def test_names_that_a_method_does_not_have_are_not_kept() -> None:
    (entry,) = registry_of(plain)
    name = "".join(["x"] * 1000)
    held = sys.getrefcount(name)
    with suppress(ArgumentError):
        refuse_unfit(entry, 0, {"city": "here", name: 1})
    assert sys.getrefcount(name) == held


def test_an_entry_survives_its_stored_form_and_fields_of_other_releases_are_ignored() -> None:
    plugin = NekroPlugin("Näme \ud800", "p", "about", "1.2", "tests", "http://x", support_adapter=["a"])

    plugin.mount_sandbox_method(SandboxMethodType.AGENT, "label")(swapped)
    plugin.mount_init_method()(nothing)
    plugin.mount_command("go", description="Goes", aliases=["g"])(nothing)
    (entry,) = LoadedRegistry([plugin]).plugins
    assert (entry.hooks, entry.commands[0].full_name) == (("init",), "tests.p:go")
    text = entry.to_json()
    read = PluginEntry.from_json(text)
    assert read == entry and read.to_json() == text and text.isascii()
    other = json.loads(text) | {"colour": "red", "config_schema": {"properties": {}}}
    other["methods"][0]["cost"] = 3
    assert PluginEntry.from_json(json.dumps(other)) == entry
    assert PluginEntry.from_json('{"key": "k"}') == PluginEntry(key="k", status=PluginStatus.OK)


def test_equal_entries_have_equal_digests() -> None:
    one, other = (registry_of(plain).plugins[0].to_json() for _ in range(2))
    assert digest_of(one) == digest_of(other) != digest_of(one + " ")


def test_task_messages_and_result_keys_are_those_of_celery(app: NekroApp) -> None:
    assert TaskMessage._fields == task_message._fields
    key = Keys(prefix=app.nekro_settings.broker.key_prefix).result("abc")
    assert app.backend.get_key_for_task("abc").decode() == key
