"""What goes to a driver and comes from it: types, and the escape of characters that no database accepts.

``storage.sql.FaithfulText`` and statements that are written as text use the escape."""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from nekro_agent.errors import InvalidValueError

__all__ = [
    "Parameters",
    "Row",
    "escaped",
    "unescaped",
]


#: The values of one row, in the order of the statement's columns.
Row: TypeAlias = tuple[Any, ...]
#: Values in the form that a driver accepts: by position or by name.
Parameters: TypeAlias = tuple[Any, ...] | dict[str, Any]


#: A noncharacter that Unicode reserves for use inside programs; it marks an escape.
_ESCAPE: Final = "\ufdd0"

_TO_ESCAPE: Final = re.compile(f"[\0\ud800-\udfff{_ESCAPE}]")

_ESCAPED: Final = re.compile(f"{_ESCAPE}([0-9a-f]{{4}})")


def escaped(value: str) -> str:
    """Escape a text for the database.

    Raises:
        InvalidValueError: it is no text; plugins pass any value.
    """
    if not isinstance(value, str):
        raise InvalidValueError(f"{repr(value)[:80]} is not text")
    if value.isascii() and "\0" not in value:  # a fast check that most values pass
        return value
    return _TO_ESCAPE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", value)


def unescaped(value: str) -> str:
    """Undo ``escaped``."""
    if _ESCAPE not in value:
        return value
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), value)
