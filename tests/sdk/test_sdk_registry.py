"""The catalogue: names, precedence, lanes, and visibility in a chat."""

from __future__ import annotations

from typing import Any

import pytest

from broker_config.settings import ApprovalSettings
from nekro.plugins.entries import PluginEntry
from nekro.plugins.lanes import LaneChooser
from nekro.plugins.registry import LoadedRegistry
from nekro_agent.core.logger import logger
from nekro_agent.errors import InvalidValueError, MethodDisabledError, MethodNotFoundError
from nekro_agent.methods import Lane, SandboxMethod, SandboxMethodType
from nekro_agent.mounts import long_running
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx

TOOL = SandboxMethodType.TOOL


def plugin_with(*names: str, author: str = "Ada", labels: dict[str, str] | None = None) -> NekroPlugin:
    plugin = NekroPlugin("n", f"m_{'_'.join(names)}", "", "1", author, "")
    for name in names:

        async def method(ctx: AgentCtx, city: str) -> str:
            """Doc."""
            return city

        method.__name__ = name
        plugin.mount_sandbox_method(TOOL, (labels or {}).get(name, "标签"))(method)
    return plugin


def test_a_method_is_found_by_full_name_function_name_and_label() -> None:
    registry = LoadedRegistry([plugin_with("query", labels={"query": "ask_weather"})])
    entry = registry.find("query")
    assert entry.task == "Ada.m_query.query"
    assert registry.find("Ada.m_query.query") is entry and registry.find("ask_weather") is entry
    assert sorted(registry.bare_names(entry)) == ["ask_weather", "query"]
    assert (entry.signature, entry.doc, entry.lane, entry.type) == (
        "(city: str) -> str",
        "Doc.",
        Lane.METHODS,
        TOOL,
    )
    assert len(registry) == 1 and "query" in registry and "other" not in registry


def test_of_two_equal_names_the_first_loaded_has_precedence_and_both_stay_callable() -> None:
    first, second = plugin_with("same", author="Ada"), plugin_with("same", author="Bob")
    logged: list[str] = []
    sink = logger.add(lambda message: logged.append(message.record["message"]), level="INFO")
    registry = LoadedRegistry([first, second])
    registry.serve([first, second])
    logger.remove(sink)
    assert logged == []  # each process of a fleet would repeat it
    assert registry.find("same").plugin_key == first.key
    assert registry.find("Bob.m_same.same").plugin_key == second.key
    (warning,) = registry.warnings
    assert "the bare name calls Ada.m_same.same, the other is callable as Bob.m_same.same" in warning
    assert registry.bare_names(registry.find("Bob.m_same.same")) == []


def test_a_function_name_has_precedence_over_a_label() -> None:
    labelled = plugin_with("other", author="Ada", labels={"other": "same"})
    named = plugin_with("same", author="Bob")
    registry = LoadedRegistry([labelled, named])
    assert registry.find("same").plugin_key == named.key
    assert registry.bare_names(registry.find("other")) == ["other"]


def test_labels_that_are_not_free_identifiers_are_not_names() -> None:
    registry = LoadedRegistry([plugin_with("a", "b", labels={"a": "class", "b": "two words"})])
    assert registry.warnings == []
    for label in ("class", "two words"):
        with pytest.raises(MethodNotFoundError):
            registry.find(label)


def test_an_unknown_name_comes_with_a_suggestion() -> None:
    registry = LoadedRegistry([plugin_with("query_weather")])
    with pytest.raises(MethodNotFoundError, match=r"'query_wether'; did you mean query_weather"):
        registry.find("query_wether")
    with pytest.raises(MethodNotFoundError, match="`nekro methods` lists every method"):
        registry.find("zzz")


async def test_a_disabled_plugin_offers_nothing_and_reserves_no_name() -> None:
    off, on = plugin_with("same", author="Ada"), plugin_with("same", author="Bob")
    off.set_enabled(False)
    registry = LoadedRegistry([off, on])
    assert registry.find("same").plugin_key == on.key
    with pytest.raises(MethodDisabledError, match=r"Ada\.m_same is disabled; `nekro plugins enable Ada"):
        registry.find("Ada.m_same.same")
    assert [entry.plugin_key for entry in registry.enabled()] == [on.key]
    assert [entry.plugin_key for entry in await registry.available(AgentCtx.for_call(chat_key="c"))] == [
        on.key
    ]


def test_a_lane_is_set_by_the_decorator_argument_or_pattern() -> None:
    plugin = NekroPlugin("n", "lanes", "", "1", "Ada", "")

    @long_running
    @plugin.mount_sandbox_method(TOOL, "above")
    async def above(ctx: AgentCtx) -> None:
        """Doc."""

    @plugin.mount_sandbox_method(TOOL, "below")
    @long_running
    async def below(ctx: AgentCtx) -> None:
        """Doc."""

    @plugin.mount_sandbox_method(TOOL, "argument", lane="long")
    async def argument(ctx: AgentCtx) -> None:
        """Doc."""

    @plugin.mount_sandbox_method(TOOL, "pattern")
    async def pattern(ctx: AgentCtx) -> None:
        """Doc."""

    registry = LoadedRegistry([plugin], long_methods=["Ada.lanes.patt*"])
    assert {entry.lane for entry in registry} == {Lane.LONG}
    assert LoadedRegistry([plugin]).find("pattern").lane is Lane.METHODS


def test_plugin_and_settings_say_which_methods_require_approval() -> None:
    plugin = NekroPlugin("n", "spend", "", "1", "Ada", "")

    @plugin.mount_sandbox_method(TOOL, "pay", requires_approval=True)
    async def pay(ctx: AgentCtx) -> None:
        """Doc."""

    @plugin.mount_sandbox_method(TOOL, "look")
    async def look(ctx: AgentCtx) -> None:
        """Doc."""

    def required(**approval: tuple[str, ...]) -> list[str]:
        registry = LoadedRegistry([plugin], approval=ApprovalSettings(**approval))
        registry.serve([plugin])
        return [entry.name for entry in registry if entry.requires_approval]

    assert required() == ["pay"]
    assert required(require=("Ada.spend.l*",)) == ["pay", "look"]
    assert required(require=("*",), exempt=("Ada.*.pay",)) == ["look"]
    pay_entry, look_entry = LoadedRegistry([plugin])
    assert (pay_entry.is_claimed, look_entry.is_claimed) == (True, False)
    published = LoadedRegistry([plugin]).plugins[0]
    assert PluginEntry.from_json(published.to_json()) == published


def test_an_override_moves_a_method_or_pins_its_plugin_until_it_is_removed() -> None:
    first, second = (entry for name in ("one", "two") for entry in LoadedRegistry([plugin_with(name)]))
    lanes = LaneChooser(pinned_plugins=[second.plugin_key])
    queues = [lanes.lane_of(first), lanes.lane_of(second)]
    assert queues == ["methods", f"pinned.{second.plugin_key}"]
    lanes.update_overrides({first.task: "long"})
    assert [lanes.lane_of(first), lanes.lane_of(second)] == ["long", queues[1]]
    lanes.update_overrides({first.plugin_key: "pinned"})
    assert lanes.is_pinned(first.plugin_key) and lanes.is_pinned(second.plugin_key)
    assert lanes.lane_of(first) == lanes.lane_of_plugin(first.plugin_key) == f"pinned.{first.plugin_key}"
    lanes.update_overrides({})
    assert [lanes.lane_of(first), lanes.lane_of(second)] == queues
    assert not lanes.is_pinned(first.plugin_key)


@pytest.mark.parametrize("arguments", [{"method_type": "tol"}, {"method_type": TOOL, "lane": "fast"}])
def test_unknown_types_and_lanes_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="does not exist; choose one of"):
        NekroPlugin("n", "n", "", "1", "Ada", "").mount_sandbox_method(name="x", **arguments)


async def test_a_chat_sees_the_methods_chosen_by_the_collect_hook() -> None:
    plugin = plugin_with("one", "two", "three")
    one, _, three = (method.func for method in plugin.sandbox_methods)

    @plugin.mount_collect_methods()
    async def collect(ctx: AgentCtx) -> list[Any]:
        if ctx.chat_key == "broken":
            raise RuntimeError("no")
        if ctx.chat_key == "foreign":
            return [lambda ctx: None]
        return [one, SandboxMethod(method_type=TOOL, name="", description="", func=three)]

    registry = LoadedRegistry([plugin])

    async def seen(chat_key: str) -> list[str]:
        return [entry.name for entry in await registry.available(AgentCtx.for_call(chat_key=chat_key))]

    assert await seen("c") == ["one", "three"]
    assert await seen("broken") == await seen("foreign") == ["one", "two", "three"]
    assert "* one(city: str) -> str" in await plugin.render_sandbox_methods_prompt(
        AgentCtx.for_call(chat_key="c")
    )


def test_signatures_are_shown_as_written() -> None:
    plugin = NekroPlugin("n", "sigs", "", "1", "Ada", "")

    @plugin.mount_sandbox_method(TOOL, "x")
    async def everything(
        ctx: AgentCtx,
        a: list[dict[str, int]],
        b: Any = object(),  # noqa: B008
        *rest: int,
        key: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Doc."""
        return {}

    @plugin.mount_sandbox_method(TOOL, "y")
    def bare(ctx, x, *, y=1, z="é"):  # type: ignore[no-untyped-def]
        """Doc."""

    @plugin.mount_sandbox_method(TOOL, "z")
    async def nothing() -> None:
        """Doc."""

    signatures = {entry.name: entry.signature for entry in LoadedRegistry([plugin])}
    assert signatures == {
        "everything": (
            "(a: list[dict[str, int]], b: Any = ..., *rest: int, key: str | None = None, **more: Any)"
            " -> dict[str, Any]"
        ),
        "bare": "(x, *, y=1, z='é')",
        "nothing": "() -> None",
    }
