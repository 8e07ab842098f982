"""The decoder refuses a corpus of hostile texts and accepts plain values of any shape."""

from __future__ import annotations

import collections
from datetime import date, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hostile_texts import corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from nekro.sandbox.guest.values import open_value
from nekro.wire.budget import DecodeBudget
from nekro.wire.parser import load
from nekro.wire.values import arguments_text, decode_arguments, decode_value, encode_arguments, encode_value
from nekro_agent.errors import ArgumentError

MIB = 1 << 20

zones = st.builds(timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)))
whole = st.integers(-(2**60) + 1, 2**60 - 1)
text = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["$", "$tuple", "$x", "\x7f", ""])
keys = text | st.binary() | whole | st.booleans() | st.none() | st.dates() | st.tuples(text, whole)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**2000), 2**2000)
    | st.floats()
    | st.complex_numbers()
    | text
    | st.binary()
    | st.binary().map(bytearray)
    | st.datetimes(timezones=st.none() | zones)
    | st.dates()
    | st.times()
    | st.timedeltas(timedelta(days=-(10**8)), timedelta(days=10**8))
    | st.decimals(-(10**100), 10**100, allow_nan=False, places=6)
    | st.fractions()
    | st.uuids()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=40,
)


def shape(value: Any) -> Any:
    """A value with its types spelled out, so that 1, True and 1.0 differ and NaN equals itself."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        return kind, tuple(map(shape, value))
    if isinstance(value, dict):
        return kind, tuple((shape(key), shape(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(shape, value))
    return kind, repr(value)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, types included."""
    return bool(shape(one) == shape(other))


@pytest.mark.extended
@settings(max_examples=100)
@given(value=values)
def test_plain_values_round_trip_in_both_directions(value: Any) -> None:
    text = encode_value(value, max_bytes=MIB)
    assert same(decode_value(text, max_bytes=MIB), value)
    assert same(open_value(text), value), "inside the sandbox"


@pytest.mark.extended
@settings(max_examples=60)
@given(args=st.lists(values), kwargs=st.dictionaries(text, values))
def test_arguments_round_trip(args: list[Any], kwargs: dict[str, Any]) -> None:
    data = encode_arguments(tuple(args), kwargs).encode()
    assert same(decode_arguments(data, max_bytes=len(data)), (tuple(args), kwargs))


@pytest.mark.parametrize(("name", "data"), corpus(), ids=[name for name, _ in corpus()])
def test_hostile_data_is_refused(name: str, data: bytes) -> None:
    before = vars(collections.OrderedDict).keys(), vars(Decimal).keys(), vars(date).keys()
    with pytest.raises(ArgumentError):
        load(arguments_text(data), DecodeBudget())
    assert (vars(collections.OrderedDict).keys(), vars(Decimal).keys(), vars(date).keys()) == before


def test_corpus_is_at_least_as_large_as_the_studied_one() -> None:
    names = [name for name, _ in corpus()]
    assert len(set(names)) == len(names) >= 200
