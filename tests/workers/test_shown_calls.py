"""Calls as approvers see them."""

from __future__ import annotations

import ast
import json

import pytest
from waiting import cpu_limit

from workers.approvals.shown import MOST_ARGUMENT_BYTES, shown_call


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
