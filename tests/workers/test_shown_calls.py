"""Calls as approvers see them."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from steps import steps
from waiting import cpu_limit

from nekro.app.approvals.shown import MOST_ARGUMENT_BYTES, call_line, difference, shown_call
from nekro_agent.tools.visible_text import all_visible

if TYPE_CHECKING:
    from storage.accounts.approvals import Approval


def edited(before: object, after: object) -> Approval:
    """A request whose approver changed its only argument."""
    texts = [json.dumps([[value], {}], separators=(",", ":")) for value in (before, after)]
    assert max(map(len, texts)) <= MOST_ARGUMENT_BYTES == 64 << 10
    return cast("Approval", SimpleNamespace(method="pay", arguments=texts[0], edited_arguments=texts[1]))


def nested(levels: int, inner: object) -> object:
    return inner if not levels else [nested(levels - 1, inner)]


@pytest.mark.parametrize("levels", [0, 3, 7, 8, 60])
def test_a_call_is_shown_as_python_that_makes_the_same_call(levels: int) -> None:
    value = nested(levels, list(range(60)))
    shown = shown_call("pay", json.dumps([[value], {"a b": "x"}], separators=(",", ":")))
    call = ast.parse(shown, mode="eval").body
    assert isinstance(call, ast.Call)
    assert [ast.literal_eval(argument) for argument in call.args] == [value]
    assert (shown.count("\n") > 20) == (levels < 8)


def test_a_deeply_nested_call_is_shown_in_little_time() -> None:
    """Each of its levels is written as often as it has levels above it."""
    value = [nested(60, 1) for _ in range(500)]
    text = json.dumps([[value], {}], separators=(",", ":"))
    assert len(text) < MOST_ARGUMENT_BYTES
    with cpu_limit(5):
        for _ in range(10):
            shown_call("pay", text)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([[], {}], "pay()"),
        ([["ada", 3], {"for_": None}], "pay('ada', 3, for_=None)"),
        ([["a\nb\u202e\u3164\u200d"], {}], r"pay('a\nb\u202e\u3164\u200d')"),
        ([["x" * 5000, "bob"], {}], f"pay('{'x' * 59}…, 'bob')"),
        ([[], {"a=1, b": 2, "n" * 5000: 3}], f"pay(**{{'a=1, b': 2}}, {'n' * 60}…=3)"),
        (
            [[f"{number:040}" for number in range(9)], {}],
            f"pay({', '.join(repr(f'{n:040}') for n in range(4))}, …)",
        ),
        ([["\u3164" * 5000], {}], "pay('" + r"\u3164" * 9 + r"\u316…)"),
    ],
)
def test_a_call_on_one_line_shows_every_argument_within_bounds(arguments: object, shown: str) -> None:
    text = json.dumps(arguments, separators=(",", ":"))
    line = call_line("pay", text)
    assert line == shown
    assert len(line) <= 300 and all_visible(line) == line and "\n" not in line


def test_a_call_whose_arguments_cannot_be_read_is_listed() -> None:
    assert call_line("pay", '[["cut') == "pay(…)"


def test_a_list_of_the_longest_calls_is_shown_in_little_time() -> None:
    text = json.dumps([[list(range(8000)), "\u3164" * 2000], {}], ensure_ascii=False, separators=(",", ":"))
    assert 40_000 < len(text.encode()) < MOST_ARGUMENT_BYTES
    with cpu_limit(5):
        for _ in range(100):
            call_line("pay", text)


#: Arguments by their approximate length as JSON: what was requested, and what an approver made of it. Each
#: made a text or a comparison grow faster than its length.
EDITS: dict[str, Callable[[int], tuple[object, object]]] = {
    "alike items": lambda size: ([1, 2] * (size // 4), [1] * (size // 2)),
    "few kinds of items": lambda size: (
        [number % 100 for number in range(size // 3)],
        sorted(number % 100 for number in range(size // 3)),
    ),
    "moved items": lambda size: (list(range(size // 6)), list(range(size // 6))[::-1]),
    "a long key before a list": lambda size: ({"k" * (size // 2): [1] * (size // 4)}, {}),
    "long keys in each other": lambda size: (
        {"k" * (size // 4): {"l" * (size // 4): {"m": [1] * (size // 4)}}},
        {"k" * (size // 4): {"l" * (size // 4): {"m": [2] * (size // 4)}}},
    ),
    "one long word": lambda size: ("a" * size, "b" * size),
    "short words": lambda size: ("a " * (size // 2), "a b " * (size // 4)),
    "spaces before long words": lambda size: ((" " + "a" * 80) * (size // 81), "a"),
    "lines": lambda size: ("\n" * (size // 2), "\n \n" * (size // 5)),
    "escapes": lambda size: ("\u200b" * (size // 6), "\\" * (size // 2)),
    "nested lists": lambda size: ([nested(60, 1)] * (size // 123), [nested(7, [1] * (size // 4))]),
}


@pytest.mark.one_python
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_showing_an_edited_call_takes_steps_and_text_in_proportion_to_its_length(
    edit: Callable[[int], tuple[object, object]],
) -> None:
    def show(size: int) -> Callable[[], None]:
        row = edited(*edit(size))
        given = len(row.arguments) + len(row.edited_arguments or "")

        def work() -> None:
            shown = shown_call("pay", row.arguments), shown_call("pay", row.edited_arguments or "")
            found = difference(row)
            assert found.startswith("--- requested\n+++ approved\n@@ ")
            assert len("".join(shown)) + len(found) < 64 * given

        return work

    # Shorter arguments are read by another parser.
    few = steps(show(6 << 10), most=100 * (6 << 10))
    steps(show(60 << 10), most=10 * 2 * few)


@pytest.mark.parametrize("seed", range(4))
def test_a_difference_turns_one_call_into_the_other(seed: int) -> None:
    """As GNU patch reads it: each line of either call is in the difference or between its parts."""
    chance = random.Random(seed)
    for kinds in (2, 8, 1000):
        before = [chance.randrange(kinds) for _ in range(chance.randrange(1, 60))]
        after = before.copy()
        for _ in range(chance.randrange(5)):
            after.pop(chance.randrange(len(after)))
            after.insert(chance.randrange(len(after) + 1), chance.randrange(kinds))
        row = edited(before, after)
        calls = [shown_call("pay", text or "").split("\n") for text in (row.arguments, row.edited_arguments)]
        assert patched(calls[0], difference(row)) == calls[1]


def patched(lines: list[str], diff: str) -> list[str]:
    """Apply a unified diff."""
    made, at = [], 0
    for line in diff.split("\n")[2:]:
        if header := re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@", line):
            start = int(header[1]) - (header[2] != "0")
            made += lines[at:start]
            at = start
        elif line.startswith(("-", " ")):
            assert lines[at] == line[1:]
            at += 1
        if line.startswith(("+", " ")):
            made.append(line[1:])
    return made + lines[at:]


def test_a_difference_shows_distant_edits_alone() -> None:
    value = [f"line {number}" for number in range(2000)]
    row = edited(value, ["first", *value[1:1000], "new", *value[1000:-1], "last"])
    changed = [line for line in difference(row).split("\n")[2:] if line[0] in "+-"]
    assert [line.replace(" ", "") for line in changed] == [
        "-'line0',", "+'first',", "+'new',", "-'line1999',", "+'last',",
    ]  # fmt: skip


#: Code points that Python's ``repr`` leaves, although nobody sees them.
UNSEEN = (0x034F, 0x115F, 0x1160, 0x17B4, 0x180B, 0x2800, 0x3164, 0xFE0F, 0xFFA0, 0xE0101)


@pytest.mark.parametrize("code", UNSEEN, ids=hex)
def test_no_invisible_character_is_left_in_a_call(code: int) -> None:
    char = chr(code)
    args = [f"ada{char}", {f"key{char}": [f"é{char}"]}, nested(30, f"deep{char}")]
    shown = shown_call(
        "pay", json.dumps([args, {f"amount{char}": 1, char: 2, "to": f"❤{char}"}], separators=(",", ":"))
    )
    assert char not in shown
    call = ast.parse(shown, mode="eval").body
    assert isinstance(call, ast.Call)
    assert [ast.literal_eval(argument) for argument in call.args] == args
    named: dict[str, object] = {}
    for keyword in call.keywords:
        value = ast.literal_eval(keyword.value)
        named |= value if keyword.arg is None else {keyword.arg: value}
    assert named == {f"amount{char}": 1, char: 2, "to": f"❤{char}"}


def test_letters_that_people_see_are_shown_as_they_are() -> None:
    shown = shown_call("pay", json.dumps([["你好 é", "한국어"], {"größe": 1}], separators=(",", ":")))
    assert "'你好 é'" in shown and "'한국어'" in shown and "größe=1" in shown
