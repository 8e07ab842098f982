"""What is read and written quickly is what ``json`` reads and writes, and so is what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.plain_json import dump, load

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
def test_what_is_written_is_read_again(value: Any) -> None:
    written = dump(value)
    plain = json.loads(json.dumps(value))
    assert load(written) == plain
    assert json.loads(written) == plain
    assert load(json.dumps(value)) == load(json.dumps(value).encode()) == plain


@pytest.mark.parametrize("text", [b"", b"{", b"[1,]", b"\xff", b'{"a":1}x', b'"\\ud800"x', b"nul", "[" * 50])
def test_what_is_no_json_is_refused(text: bytes | str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        load(text)


def test_deep_nesting_is_read_as_json_does_and_its_end_is_the_same() -> None:
    deep = "[" * 500 + "]" * 500
    assert load(deep) == json.loads(deep)
    with pytest.raises(RecursionError):
        load("[" * 100_000)


def test_circles_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises((ValueError, RecursionError)):
        dump(circle)


@given(st.dictionaries(st.text(st.characters()), st.text(st.characters())))
def test_any_text_survives(value: dict[str, str]) -> None:
    assert load(dump(value)) == value
