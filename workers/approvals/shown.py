"""A call as an approver sees it: exactly what will run, as Python literals.

Python's ``repr`` escapes control characters, changes of the writing direction, and characters without a
width, so no argument can hide a part of itself or of another one.
"""

from __future__ import annotations

import difflib
import pprint
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from codec.values import Arguments, decode_arguments
from runtime.plain import to_json_value

if TYPE_CHECKING:
    from storage.access.approvals import Approval

__all__ = ["MOST_ARGUMENT_BYTES", "arguments_of", "difference", "plain_arguments", "shown_call"]

#: Longest arguments, as tagged text, that a person can be asked to read.
MOST_ARGUMENT_BYTES: Final = 64 << 10
_WIDTH: Final = 100
#: A value that is nested deeper stands on one line: to lay out a level, all levels below are written.
_MOST_LEVELS: Final = 8


def arguments_of(text: str) -> Arguments:
    """Return the arguments of a tagged text.

    Raises:
        ArgumentError: it is malformed, or longer than ``MOST_ARGUMENT_BYTES``.
    """
    return decode_arguments(text, max_bytes=MOST_ARGUMENT_BYTES)


def plain_arguments(text: str) -> dict[str, Any]:
    """Return ``{"args", "kwargs"}`` as JSON data; ``shown_call`` is exact where JSON lacks a type."""
    args, kwargs = arguments_of(text)
    return {
        "args": [to_json_value(value) for value in args],
        "kwargs": {name: to_json_value(value) for name, value in kwargs.items()},
    }


def shown_call(method: str, text: str) -> str:
    """Return a call as Python source.

    Args:
        text: the arguments as tagged text.
    """
    lines = list(_lines(text))
    if not lines:
        return f"{method}()"
    if len(lines) == 1 and "\n" not in lines[0]:
        return f"{method}({lines[0]})"
    body = "\n".join(f"    {line}," for entry in lines for line in [entry.replace("\n", "\n    ")])
    return f"{method}(\n{body}\n)"


def difference(row: Approval) -> str:
    """Return what the approver changed, as a unified diff of the two calls; "" without a change."""
    if row.edited_arguments is None:
        return ""
    before = shown_call(row.method, row.arguments).split("\n")
    after = shown_call(row.method, row.edited_arguments).split("\n")
    return "\n".join(difflib.unified_diff(before, after, "requested", "approved", lineterm=""))


def _lines(text: str) -> Iterator[str]:
    args, kwargs = arguments_of(text)
    yield from (_literal(value) for value in args)
    # A name is any string: code may write ``f(**{"a=1, b": 2})``.
    yield from (
        f"{name}={_literal(value)}" if name.isidentifier() else f"**{{{name!r}: {_literal(value)}}}"
        for name, value in kwargs.items()
    )


def _literal(value: object) -> str:
    if _is_deep(value):
        return repr(value)
    return pprint.pformat(value, width=_WIDTH, sort_dicts=False)


def _is_deep(value: object) -> bool:
    """Whether a value has more than ``_MOST_LEVELS`` levels of containers."""
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        mappings = [one for one in level if isinstance(one, dict)]
        others = [one for one in level if isinstance(one, list | tuple | set | frozenset)]
        if not mappings and not others:
            return False
        inner = chain.from_iterable(chain(one.keys(), one.values()) for one in mappings)
        level = [*inner, *chain.from_iterable(others)]
    return True
