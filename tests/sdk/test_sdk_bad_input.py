"""Wrong arguments of public functions raise an error that a plugin's author can read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sdk_signatures import CALLS, documented, owner_of

from nekro_agent.api import message
from nekro_agent.api.plugin import NekroPlugin, task
from nekro_agent.errors import InvalidValueError, NekroError
from nekro_agent.services.message_service import message_service
from nekro_agent.testing import InMemoryRuntime

#: Types whose functions are called; the others are data, or accept anything.
OWNERS = (
    "PluginStore",
    "AgentCtx",
    "FileSystem",
    "MessageService",
    "nekro_agent.api.message",
    "nekro_agent.api.timer",
    "nekro_agent.tools.path_convertor",
)
GARBAGE = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.text(max_size=5),
    st.sampled_from(["", "\0", "../..", "/etc/passwd", "x" * 5000, "\ud800"]),
)


def functions(world: InMemoryRuntime, plugin: NekroPlugin) -> dict[str, tuple[Callable[..., Any], list[str]]]:
    """Bound documented functions by name, with their required parameters."""
    ctx = world.context(plugin_key=plugin.key)
    objects: dict[str, Any] = {
        "PluginStore": plugin.store,
        "AgentCtx": ctx,
        "FileSystem": ctx.fs,
        "MessageService": message_service,
    }
    found: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for owner, calls in CALLS.items():
        name = owner.partition(":")[2] or owner
        if name not in OWNERS:
            continue
        for call in calls:
            function, parameters = documented(call)
            if function.startswith("create_by"):
                continue  # requires objects of the API itself
            bound = getattr(objects.get(name) or owner_of(owner), function)
            needed = [p for p, _, default in parameters if p != "self" and default is inspect.Parameter.empty]
            found[f"{name}.{function}"] = bound, needed
    return found


@pytest.mark.extended
@given(data=st.data())
@settings(max_examples=300)
async def test_arbitrary_values_are_accepted_or_raise_value_or_type_errors(data: st.DataObject) -> None:
    plugin = NekroPlugin("p", "p", "", "1", "Ada", "")
    async with InMemoryRuntime(plugin) as world:
        known = functions(world, plugin)
        function, needed = known[data.draw(st.sampled_from(sorted(known)))]
        given_ctx = world.context(plugin_key=plugin.key)
        arguments = {name: given_ctx if name == "ctx" else data.draw(GARBAGE, name) for name in needed}
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                await result
        except (ValueError, TypeError, NekroError) as exc:
            assert str(exc)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda ctx: message.send_text("c", "hi", "c"), "send_text: ctx must be the AgentCtx, not str"),
        (lambda ctx: message.send_text(7, "hi", ctx), "chat_key=7 is not a chat key"),
        (lambda ctx: message.send_file(7, "/app/shared/x", ctx), "chat_key=7 is not a chat key"),
        (lambda ctx: message.send_file("c", "x" * 5000, ctx), r"cannot send 'x{200}…': it is neither"),
        (lambda ctx: message.download_from_url("http://x", None), "pass the AgentCtx"),
        (lambda ctx: ctx.fs.mixed_forward_file("some, text " * 500), "is neither a file of this chat"),
        (lambda ctx: ctx.fs.mixed_forward_file(b"x", file_name=7), "a file name must be text, not int: 7"),
        (lambda ctx: task.start("t", "1", "c", None), "needs the NekroPlugin as its fourth argument"),
    ],
)
async def test_common_mistakes_are_named(world: InMemoryRuntime, call: Any, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        await call(world.context(plugin_key="Ada.sample"))


def test_descriptions_may_be_missing() -> None:
    plugin = NekroPlugin("n", "m", None, None, "Ada", None)  # type: ignore[arg-type]
    assert (plugin.description, plugin.version, plugin.url) == ("", "", "")
