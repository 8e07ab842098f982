"""Arrays and data frames as plain data, which the tagged text of a kept variable can hold.

A form is a tuple that begins with a mark. Values that a form does not return exactly have none. Nothing here
imports numpy or pandas unless a form is read.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

__all__ = ["form_of", "value_of"]

ARRAY, NUMBER, COLUMN, FRAME = "\0array", "\0number", "\0column", "\0frame"
#: Kinds of numpy types whose bytes are the whole value: bool, numbers, times and text, no objects.
KINDS = frozenset("biufcmMUS")


def form_of(value: Any, most_bytes: int) -> tuple[Any, ...] | None:
    """Return the form of an array, a number of numpy, a column or a data frame; None of other values."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if type(value) is numpy.ndarray:
        check_size(value.nbytes, most_bytes)
        return array_form(value)
    if isinstance(value, numpy.generic):
        return (NUMBER, *array_form(numpy.asarray(value))[1:])
    pandas: Any = sys.modules.get("pandas")
    if pandas is None or type(value) not in (pandas.Series, pandas.DataFrame):
        return None
    make: Any = column_form if type(value) is pandas.Series else frame_form
    check_size(int(numpy.sum(value.memory_usage(index=True))), most_bytes)
    form: tuple[Any, ...] = make(value)
    same = value_of(form)
    is_same = type(same) is type(value) and same.equals(value) and is_same_index(same.index, value.index)
    if make is frame_form:
        is_same = is_same and is_same_index(same.columns, value.columns)
    if not is_same or value.attrs:
        raise TypeError("it does not come back as it is")
    return form


def is_same_index(one: Any, other: Any) -> bool:
    """Whether two indexes have the same class, type, values and name."""
    kinds = type(one) is type(other) and one.dtype == other.dtype
    frequencies = [getattr(index, "freqstr", None) for index in (one, other)]
    return bool(kinds and one.equals(other) and one.name == other.name and len(set(frequencies)) == 1)


def value_of(form: Any) -> Any:
    """Return the value of a form, and any other value as it is."""
    if type(form) is not tuple or not form or form[0] not in (ARRAY, NUMBER, COLUMN, FRAME):
        return form
    mark, *parts = form
    if mark == COLUMN:
        return column_of(*parts)
    if mark == FRAME:
        return frame_of(*parts)
    numpy: Any = __import__("numpy")
    array = numpy.frombuffer(parts[2], dtype=parts[0]).reshape(parts[1]).copy()
    return array if mark == ARRAY else array[()]


def check_size(size: int, most_bytes: int) -> None:
    """Refuse what is far too large before it is copied."""
    if size > 4 * most_bytes:
        raise ValueError("it is too large")


def array_form(array: Any) -> tuple[Any, ...]:
    """Return the form of an array: type, shape and bytes."""
    if array.dtype.kind not in KINDS or array.dtype.hasobject:
        raise TypeError("an array of objects")
    return (ARRAY, array.dtype.str, list(array.shape), array.tobytes())


def values_form(values: Any) -> list[Any]:
    """Return type and values of a column or an index: bytes of numpy, or the values themselves."""
    kind = getattr(values.dtype, "kind", "O")
    if kind in KINDS and type(values.dtype).__module__.startswith("numpy"):
        return ["", array_form(values.to_numpy())]
    return [str(values.dtype), values.tolist()]


def index_form(index: Any) -> list[Any]:
    """Return the form of the names of rows."""
    pandas: Any = sys.modules["pandas"]
    if type(index) is pandas.RangeIndex:
        return [index.name, "range", [index.start, index.stop, index.step]]
    if type(index) not in (pandas.Index, pandas.DatetimeIndex):
        raise TypeError("an index of another kind")
    return [index.name, *values_form(index), getattr(index, "freqstr", None)]


def column_form(series: Any) -> tuple[Any, ...]:
    """Return the form of a column."""
    return (COLUMN, series.name, index_form(series.index), values_form(series))


def frame_form(frame: Any) -> tuple[Any, ...]:
    """Return the form of a data frame."""
    pandas: Any = sys.modules["pandas"]
    if type(frame.columns) not in (pandas.Index, pandas.RangeIndex) or not frame.columns.is_unique:
        raise TypeError("columns of another kind")
    columns = [values_form(frame[name]) for name in frame.columns]
    return (FRAME, index_form(frame.columns), index_form(frame.index), columns)


def index_of(name: Any, kind: str, values: Any, frequency: str | None = None) -> Any:
    """Build the names of rows."""
    pandas: Any = __import__("pandas")
    if kind == "range":
        return pandas.RangeIndex(*values, name=name)
    index = pandas.Index(value_of(values), dtype=kind or None, name=name)
    return pandas.DatetimeIndex(index, freq=frequency) if frequency else index


def column_of(name: Any, index: Any, values: Any) -> Any:
    """Build a column."""
    pandas: Any = __import__("pandas")
    return pandas.Series(value_of(values[1]), dtype=values[0] or None, index=index_of(*index), name=name)


def frame_of(columns: Any, index: Any, values: Any) -> Any:
    """Build a data frame."""
    pandas: Any = __import__("pandas")
    rows = index_of(*index)
    series = {
        number: pandas.Series(value_of(data), dtype=kind or None, index=rows)
        for number, (kind, data) in enumerate(values)
    }
    frame = pandas.DataFrame(series, index=rows)
    frame.columns = index_of(*columns)
    return frame
