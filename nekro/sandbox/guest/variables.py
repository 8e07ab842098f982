"""Keep the code's top-level variables for the turn's next program, as tagged text.

Arrays and data frames become plain data, called a form: a tuple that begins with a mark. Values that a form
does not return exactly have none. Nothing here imports numpy or pandas unless a form is read.
"""

from __future__ import annotations

import builtins
import os
import sys
from _json import encode_basestring
from typing import TYPE_CHECKING

from nekro.sandbox.guest.channel import KEEP, unsignalled
from nekro.sandbox.guest.readings import Unbound
from nekro.sandbox.guest.values import open_value
from nekro.wire.tagged import write_arguments

if TYPE_CHECKING:
    from typing import Any

    from nekro.sandbox.guest.channel import Channel

__all__ = [
    "Variables",
    "form_of",
    "value_of",
]

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


MOST_NAME_CHARS = 64
#: What tagged arguments have around the text of one named value.
BEFORE, AFTER = '[[],{"v":', "}]"
#: How long the threads of the code may delay the frame.
LOCK_SECONDS = 1.0

Function = type(lambda: None)
Module = type(sys)


class Variables:
    """Gives the code the variables of the program before it, and sends those that it leaves."""

    def __init__(self, run: dict[str, Any], names: dict[str, Any], channel: Channel) -> None:
        """
        Args:
            names: the globals that the code sees; ``restore`` adds the variables.
        """
        self._begins_with = run["variables"]
        self._most_bytes = run["keep"]["bytes"]
        self._most = run["keep"]["most"]
        self._names = names
        self._channel = channel
        #: Globals before the code ran. A name that was predefined is not kept, even if the code reassigns it.
        self._given = dict(names)
        self._is_sent = False

    def restore(self) -> None:
        """Give the code its variables; one whose package is missing by now is left out with a line."""
        for name, text in self._begins_with.items():
            if name in self._names or hasattr(builtins, name):
                continue
            try:
                self._names[name] = value_of(open_value(text.encode()))
            except Exception as exc:
                print(f"[{name} was not kept: {type(exc).__name__}: {exc}]", file=sys.stderr)

    def send(self) -> None:
        """Send what can be kept, once; whatever fails, the end of the code is not delayed further."""
        if not self._most_bytes or self._is_sent or os.getpid() != self._channel.owner:
            return
        self._is_sent = True
        try:
            unsignalled(self._channel.send_last, KEEP, self._payload(), LOCK_SECONDS)
        except BaseException as exc:
            print(f"[variables were not kept: {type(exc).__name__}: {exc}]", file=sys.stderr)

    def _payload(self) -> bytes:
        left = self._most_bytes
        kept: list[str] = []
        others: list[str] = []
        for name, value in list(self._names.items()):
            if not is_shown(name) or value is self._given.get(name, others) or is_imported(value):
                continue
            text = None
            if name not in self._given and not hasattr(builtins, name) and len(kept) < self._most:
                text = text_of(value, left)
            if text is None:
                others.append(encode_basestring(name))
                continue
            left -= len(text.encode())
            kept.append(f"{encode_basestring(name)}:{encode_basestring(text)}")
        return f"[[{','.join(others[: self._most])}],{{{','.join(kept)}}}]".encode()


def is_shown(name: Any) -> bool:
    """Whether a variable is meant for later: names with an underscore are for the moment."""
    return type(name) is str and len(name) <= MOST_NAME_CHARS and name.isidentifier() and name[0] != "_"


def is_imported(value: Any) -> bool:
    """Whether a value is a module, or a function or class of one."""
    kind = type(value)
    if kind is Module:
        return True
    if kind is Function or issubclass(kind, type):
        return bool(value.__module__ != "__main__")
    return kind in (type(len), Unbound)


def text_of(value: Any, most_bytes: int) -> str | None:
    """Return the tagged text of a value; None if it has none or a longer one."""
    try:
        form = form_of(value, most_bytes)
        plain = value if form is None else form
        text = write_arguments((), {"v": plain}, most_bytes + len(BEFORE) + len(AFTER))
        text = text[len(BEFORE) : -len(AFTER)]
        return text if len(text.encode()) <= most_bytes else None
    except Exception:  # not plain, too long, changed by a thread meanwhile, a lone surrogate
        return None
