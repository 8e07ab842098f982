"""The reader of short texts agrees with the parser, and leaves to it whatever it cannot decide."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from fuzz_codec import form
from hypothesis import given
from hypothesis import strategies as st

from nekro.wire import values
from nekro.wire.budget import DecodeBudget
from nekro.wire.parser import load
from nekro.wire.tagged import write_text
from nekro.wire.values import SHORT_CHARS, Undecided, decode_arguments, encode_arguments, load_short
from nekro_agent.errors import ArgumentError

MIB = 1 << 20

DECIDED: dict[str, Any] = {
    "scalars": [None, True, False, 0, -7, 10**17, 1.5, 1e16, -0.0, "text"],
    "nested rows": {"rows": [{"id": 1, "tags": ["a b", 'quoted "x"', "back\\slash", "{[", "1" * 30]}] * 20},
    "texts beyond ASCII": ["é\u2028\U0001f600", {"ключ": "значение"}],
    "a control character": ["line\nbreak \u007f"],
    "tags": [
        (1, 2), {1, "a"}, frozenset({1.5}), {1: 2, "$a": 3}, b"bytes", bytearray(b"x"), float("inf"), 1 + 2j,
        dt.datetime(2024, 2, 29, 9, 30, tzinfo=dt.UTC), dt.date(2024, 2, 29), dt.timedelta(1, 2, 3),
        Decimal("1.50"), Fraction(1, 3), UUID(int=7),
    ],
}  # fmt: skip


@pytest.mark.parametrize("value", DECIDED.values(), ids=DECIDED)
def test_everyday_values_are_read_without_the_parser(value: Any) -> None:
    text = write_text(value, MIB)
    assert form(load_short(text)) == form(load(text, DecodeBudget())) == form(value)


LEFT_TO_THE_PARSER: dict[str, str] = {
    "a blank": "[1, 2]",
    "a blank at the end": "[1] ",
    "a line break": "[1,\n2]",
    "a blank behind an escaped quote": '["\\"", 1]',
    "a blank behind a backslash": '["\\\\", 1]',
    "a key twice": '{"a":1,"a":2}',
    "a key twice with tags": '[{"$tuple":[]},{"a":1,"a":2}]',
    "65 arrays": "[" * 65 + "]" * 65,
    "NaN": "[NaN]",
    "Infinity": "[-Infinity]",
    "an integer of 19 digits": "[1234567890123456789]",
    "a number of many digits": "9" * 2000,
    "an infinite float": "[1e999]",
    "an exponent of six digits": "[1e000001]",
    "a capital exponent": "[1E5]",
    "half a surrogate pair": '["\\ud800"]',
    "half a surrogate pair in capitals": '["\\uDC00"]',
    "a tag beside a key": '{"$tuple":[],"a":1}',
    "a tag behind a key": '{"a":1,"$tuple":[]}',
    "an escaped tag beside a key": '{"a":1,"\\u0024tuple":[]}',
    "an unknown tag": '{"$ref":[]}',
    "a path as a date": '{"$date":{"$path":"2024-01-01"}}',
    "a path": '{"$path":"a"}',
    "something behind the value": "[1]]",
    "no value": "",
    "an open string": '["a',
    "a longer text": f'"{"x" * SHORT_CHARS}"',
}


@pytest.mark.parametrize("text", LEFT_TO_THE_PARSER.values(), ids=LEFT_TO_THE_PARSER)
def test_ambiguous_texts_are_left_to_the_parser(text: str) -> None:
    with pytest.raises(Undecided):
        load_short(text)


PARTS = st.recursive(
    st.sampled_from(
        [
            *(
                "1",
                "-0",
                "1.5",
                "1e5",
                "1e400",
                "12345678901234567890",
                "01",
                "NaN",
                "true",
                "nul",
                " 1",
                "1 ",
            ),
            *('"a b"', '"\\""', '"\\\\"', '"\\ud800"', '"\\u0024a"', '"["', "[]", "{}", '{"$path":"a"}'),
        ]
    ),
    lambda parts: st.one_of(
        st.lists(parts, max_size=4).map(lambda items: f"[{','.join(items)}]"),
        st.lists(
            st.tuples(st.sampled_from(["a", "b", "$tuple", "$set", "$dict", "\\u0024date", "$x"]), parts),
            max_size=3,
        ).map(lambda pairs: "{" + ",".join(f'"{key}":{part}' for key, part in pairs) + "}"),
        parts.map(lambda part: "[" * 63 + part + "]" * 63),
    ),
    max_leaves=12,
)


@given(PARTS)
def test_both_readers_agree(text: str) -> None:
    try:
        short = form(load_short(text))
    except Undecided:
        return
    assert short == form(load(text, DecodeBudget()))


def test_short_arguments_are_not_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are left to the parser get its error messages."""
    monkeypatch.setattr(values, "load", lambda *_: pytest.fail("the parser was asked"))
    text = encode_arguments(({"rows": [1, 2.5, "x"]}, (1,)), {"k": b"x"})
    assert decode_arguments(text, max_bytes=MIB) == (({"rows": [1, 2.5, "x"]}, (1,)), {"k": b"x"})
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="a duplicate key"):
        decode_arguments('[[{"a":1,"a":2}],{}]', max_bytes=MIB)
