"""Column types that behave the same on SQLite and PostgreSQL."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import DateTime, Dialect, Text
from sqlalchemy.types import TypeDecorator

from nekro_agent.errors import InvalidValueError

__all__ = ["MAX_KEY_BYTES", "FaithfulText", "JsonText", "KeyText", "StateText", "UtcDateTime"]

#: Longest text in an indexed column. PostgreSQL ends an index entry, of up to two of them, at 2,700 bytes.
MAX_KEY_BYTES: Final = 1250

#: A noncharacter that Unicode reserves for use inside programs; it marks an escape in `FaithfulText`.
_ESCAPE: Final = "\ufdd0"
_TO_ESCAPE: Final = re.compile(f"[\0\ud800-\udfff{_ESCAPE}]")
_ESCAPED: Final = re.compile(f"{_ESCAPE}([0-9a-f]{{4}})")


class UtcDateTime(TypeDecorator[datetime]):
    """An aware time in, the same instant in UTC out; a naive one is refused.

    SQLite keeps ``YYYY-MM-DD HH:MM:SS.ffffff`` in UTC, which sorts as time does.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times; SQLite gets UTC without an offset."""
        if value is None:
            return None
        if value.tzinfo is None or value.utcoffset() is None:
            raise InvalidValueError(f"time {value!r} is naive; pass an aware one, such as datetime.now(UTC)")
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class FaithfulText(TypeDecorator[str]):
    """Any Python string, unchanged, also where a database's text ends.

    PostgreSQL has no NUL in text and no database has lone surrogates; both come with what plugins
    and sandboxes print. They are written as an escape (U+FDD0 and four hexadecimal digits), the
    escape character itself too, so that no two strings become one. All other text stays readable.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape."""
        if value is None or (value.isascii() and "\0" not in value):  # nearly all there is, and told at once
            return value
        return _TO_ESCAPE.sub(lambda match: f"{_ESCAPE}{ord(match[0]):04x}", value)

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], str | None]:
        """Undo the escape; without SQLAlchemy's wrapper, which would take longer than this for most texts."""
        return _unescaped


def _unescaped(value: str | None) -> str | None:
    if value is None or _ESCAPE not in value:
        return value
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), value)


class KeyText(FaithfulText):
    """Text that names something and is covered by an index: at most ``MAX_KEY_BYTES`` long."""

    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape, then refuse what no index could hold."""
        escaped = super().process_bind_param(value, dialect)
        if escaped is not None and (size := len(escaped.encode())) > MAX_KEY_BYTES:
            raise InvalidValueError(
                f"a key that begins with {escaped[:40]!r} has {size} bytes; the limit is {MAX_KEY_BYTES}"
            )
        return escaped


class JsonText(TypeDecorator[Any]):
    """A JSON value as ASCII text; None is SQL's NULL.

    Text and not the databases' own JSON, which refuse NaN, NUL and lone surrogates, each in its way.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        """Encode."""
        if value is None:
            return None
        try:
            return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as exc:
            raise InvalidValueError(
                f"a {type(value).__name__} cannot be stored as JSON: {exc}; use plain data"
            ) from exc

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        """Decode."""
        return None if value is None else json.loads(value)


class StateText(TypeDecorator[StrEnum]):
    """A member of one ``StrEnum``, as its value."""

    impl = Text
    cache_ok = True

    def __init__(self, states: type[StrEnum]) -> None:
        super().__init__()
        self.states = states

    def process_bind_param(self, value: StrEnum | None, dialect: Dialect) -> str | None:
        """Refuse words that are no member."""
        return None if value is None else self.states(value).value

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:
        """Return the member."""
        return None if value is None else self.states(value)
