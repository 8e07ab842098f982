"""The fast JSON reader and writer agree with ``json``, refusals included."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nekro.wire.plain_json import dump, load

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 70,
    1.5,
    1e300,
    "",
    'a"b\\c/\b\f\n\r\t\x00\x1f\x7f',
    "ä – 中文 🐈",
    "half a pair: \ud83d",
    [],
    {},
    {"a": [1, {"b": None}], "ключ": "значение", "x\ud800": 1},
    (1, "tuple"),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_written_values_are_read_back_equal(value: Any) -> None:
    written = dump(value)
    plain = json.loads(json.dumps(value))
    assert load(written) == plain
    assert json.loads(written) == plain
    assert load(json.dumps(value)) == load(json.dumps(value).encode()) == plain


@pytest.mark.parametrize("text", [b"", b"{", b"[1,]", b"\xff", b'{"a":1}x', b'"\\ud800"x', b"nul", "[" * 50])
def test_invalid_json_is_refused(text: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        load(text)


def test_deep_nesting_is_limited_as_in_json() -> None:
    deep = "[" * 500 + "]" * 500
    assert load(deep) == json.loads(deep)
    with pytest.raises(RecursionError):
        load("[" * 100_000)


def test_circular_references_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises((ValueError, RecursionError)):
        dump(circle)


@given(st.dictionaries(st.text(st.characters()), st.text(st.characters())))
def test_any_text_round_trips(value: dict[str, str]) -> None:
    assert load(dump(value)) == value
