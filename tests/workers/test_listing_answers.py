"""The texts of `help_of` and the ranking of `search_tools`."""

from __future__ import annotations

import pytest

from nekro.agent.model import MethodBrief
from nekro.app.rounds.sleeping_plugins import brief_of, may_sleep
from nekro.plugins.entries import PluginEntry
from nekro_agent.errors import ArgumentError
from nekro_agent.methods import SandboxMethodType
from workers.calls.method_help import MOST_HELP_CHARS, ChatPlugin, help_text, plugin_text, search


def plugin(module: str, docs: dict[str, str]) -> ChatPlugin:
    methods = {
        name: MethodBrief(name=name, signature="(x: int)", doc=doc, type=SandboxMethodType.TOOL)
        for name, doc in docs.items()
    }
    entry = PluginEntry(key=f"tests.{module}", name=module, module_name=module)
    names = {f"tests.{module}.{name}": method for name, method in methods.items()} | methods
    return ChatPlugin(entry=entry, methods=list(methods.values()), names=names)


GITHUB = plugin(
    "github",
    {
        "create_issue": "Open a new issue in a repository.",
        "list_issues": "List the issues of a repository.",
        "star": "Star a repository.\n\nAlso mentions an issue.",
    },
)
WEATHER = plugin("weather", {"forecast": "天気予報を取得する。", "get_temperature": "Read a thermometer."})
BOTH = [GITHUB, WEATHER]


def names(words: str, limit: int = 10) -> list[str]:
    return [one["name"] for one in search(BOTH, words, limit)]


def test_methods_are_ranked_by_words_then_by_where_they_are() -> None:
    assert names("create issue") == ["create_issue", "list_issues", "star"]
    assert names("ISSUES repository", 2) == ["create_issue", "list_issues"]
    assert names("weather") == ["forecast", "get_temperature"]
    assert names("天気") == ["forecast"]
    assert names("thermometer") == ["get_temperature"]


def test_words_that_match_nothing_find_similar_names() -> None:
    assert names("forcast") == ["forecast"]
    assert names("zzzzzz") == [] and names("") == []


def test_a_result_has_bounded_texts() -> None:
    long = plugin("long", {"wide": "w" * 9_000})
    (result,) = search([long], "wide")
    assert result == {"name": "wide", "signature": "(x: int)", "summary": "w" * 99 + "…", "plugin": "long"}


@pytest.mark.parametrize(
    ("words", "limit", "message"),
    [
        (3, 10, "words as a text"),
        ("x" * 501, 10, "at most 500"),
        ("x", 0, "limit=0"),
        ("x", True, "limit=True"),
    ],
)
def test_bad_arguments_of_a_search_are_refused(words: object, limit: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        search(BOTH, words, limit)


def test_help_names_methods_plugins_and_what_is_missing() -> None:
    text = help_text(BOTH, ["star", "tests.weather.forecast", "github", "creat_issue", "help_of"])
    assert "* star(x: int)\nStar a repository." in text and "天気予報" in text
    assert "Methods of plugin github:\n* create_issue - Open a new issue in a repository." in text
    assert "no method or plugin named creat_issue; similar names: create_issue" in text
    assert "* help_of(*names: str) -> str" in text


def test_help_is_bounded_and_says_what_is_not_shown() -> None:
    wide = plugin("wide", {f"m{number}": "d" * 5_000 for number in range(4)})
    text = help_text([wide], ["m0", "m1", "m2", "m3"])
    assert len(text) < MOST_HELP_CHARS + 200 and text.endswith("ask for them again: m2, m3")
    crowd = plugin("crowd", {f"m{number}": "d" * 90 for number in range(500)})
    assert len(plugin_text(crowd)) < MOST_HELP_CHARS + 1_000
    assert plugin_text(crowd).endswith("more methods; `search_tools` finds them.")
    with pytest.raises(ArgumentError, match="1 to 20 names"):
        help_text([wide], ["m0"] * 21)


@pytest.mark.parametrize(
    ("allow_sleep", "brief", "expected"),
    [(None, "", False), (None, "b", True), (True, "", True), (True, "b", True), (False, "b", False)],
)
def test_a_plugin_may_sleep_as_it_declares(allow_sleep: bool | None, brief: str, expected: bool) -> None:
    entry = PluginEntry(
        key="a.b", name="B", description="Does b.", allow_sleep=allow_sleep, sleep_brief=brief
    )
    assert may_sleep(entry) is expected
    assert not may_sleep(entry, keep_awake=("a.*",)) and may_sleep(entry, keep_awake=("x.*",)) is expected
    assert brief_of(entry) == (brief or "Does b.")
