"""What both databases share in SQL: column types, the database's clock, and ``INSERT … ON CONFLICT``.

All workers of a fleet share the database's clock. Leases and due times are compared with it, so a worker on a
host with a wrong clock neither takes over live leases nor keeps expired ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, cast

from sqlalchemy import BindParameter, ColumnElement, DateTime, Dialect, Float, Table, Text, bindparam, literal
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from nekro_agent.errors import InvalidValueError
from storage.driver.values import escaped, unescaped

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

__all__ = [
    "MAX_KEY_BYTES",
    "FaithfulText",
    "JsonText",
    "KeyText",
    "StateText",
    "UtcDateTime",
    "insert",
    "now",
    "seconds_from_now",
    "seconds_parameter",
]


#: Maximum length of a text in an indexed column. PostgreSQL limits an index entry, which has up to two of
#: them, to 2,700 bytes.
MAX_KEY_BYTES: Final = 1250


class UtcDateTime(TypeDecorator[datetime]):
    """Stores an aware time and returns the same instant in UTC; a naive time is refused.

    SQLite stores ``YYYY-MM-DD HH:MM:SS.ffffff`` in UTC, which sorts chronologically.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times; for SQLite, return UTC without an offset."""
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
    """Stores any Python string unchanged, including characters that databases do not accept.

    PostgreSQL accepts no NUL in text and neither database accepts lone surrogates; both occur in the
    output of plugins and sandboxes. They are written as an escape (U+FDD0 and four hexadecimal digits),
    and so is the escape character itself, so that different strings stay different. All other text
    stays readable.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape."""
        return _escaped(value)

    # SQLAlchemy's wrappers of these functions would take longer than the functions.

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        """Return the function that escapes."""
        return _escaped

    def result_processor(self, dialect: Dialect, coltype: object) -> Callable[[str | None], str | None]:
        """Return the function that undoes the escape."""
        return _unescaped


def _escaped(value: str | None) -> str | None:
    return None if value is None else escaped(value)


def _unescaped(value: str | None) -> str | None:
    return None if value is None else unescaped(value)


class KeyText(FaithfulText):
    """An indexed text of at most ``MAX_KEY_BYTES`` bytes."""

    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Escape, then refuse a text that is too long for an index."""
        return _short(value)

    def bind_processor(self, dialect: Dialect) -> Callable[[str | None], str | None]:
        """Return the function that does that."""
        return _short


def _short(value: str | None) -> str | None:
    if value is None:
        return None
    key = escaped(value)
    if 4 * len(key) > MAX_KEY_BYTES and (size := len(key.encode())) > MAX_KEY_BYTES:
        raise InvalidValueError(
            f"a key that begins with {key[:40]!r} has {size} bytes; the limit is {MAX_KEY_BYTES}"
        )
    return key


class JsonText(TypeDecorator[Any]):
    """A JSON value as ASCII text; None is SQL's NULL.

    The databases' own JSON types are not used, because they refuse NaN, NUL or lone surrogates.
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
    """A member of one ``StrEnum``, stored as its value."""

    impl = Text
    cache_ok = True

    def __init__(self, states: type[StrEnum]) -> None:
        super().__init__()
        self.states = states

    def process_bind_param(self, value: StrEnum | None, dialect: Dialect) -> str | None:
        """Refuse values that are not a member."""
        return None if value is None else self.states(value).value

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:
        """Return the member."""
        return None if value is None else self.states(value)


class now(FunctionElement[datetime]):
    """The time at which the statement began."""

    type = UtcDateTime()
    inherit_cache = True


class _later(FunctionElement[datetime]):
    type = UtcDateTime()
    inherit_cache = True


def seconds_from_now(seconds: float | BindParameter[float]) -> ColumnElement[datetime]:
    """The statement's time plus ``seconds``; negative means before."""
    if isinstance(seconds, BindParameter):
        return _later(seconds)
    return _later(literal(seconds, _Seconds()))


def seconds_parameter(name: str) -> BindParameter[float]:
    """A parameter for ``seconds_from_now`` in a prepared statement."""
    return bindparam(name, type_=_Seconds())


class _Seconds(TypeDecorator[float]):
    """Seconds rounded to milliseconds: SQLite has no finer resolution and parses no exponents."""

    impl = Float
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        """Round to milliseconds."""
        return None if value is None else round(float(value), 3)


@compiles(now, "postgresql")
def _now_postgresql(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "statement_timestamp()"


@compiles(now, "sqlite")
def _now_sqlite(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    # The format that SQLAlchemy writes, so that comparing the strings compares the times.
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


@compiles(_later, "postgresql")
def _later_postgresql(element: _later, compiler: SQLCompiler, **options: Any) -> str:
    return f"(statement_timestamp() + make_interval(secs => {compiler.process(element.clauses, **options)}))"


@compiles(_later, "sqlite")
def _later_sqlite(element: _later, compiler: SQLCompiler, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now', {seconds} || ' seconds') || '000')"


def insert(dialect: str, table: Table) -> postgresql.Insert:
    """Return the dialect's INSERT, which has ``on_conflict_do_update`` and ``on_conflict_do_nothing``.

    Args:
        dialect: ``sqlite`` or ``postgresql``.
    """
    if dialect == "sqlite":
        # The two classes have the same methods but no common base class that declares them.
        return cast("postgresql.Insert", sqlite.insert(table))
    # Imported here: it takes 30 ms of each process that works on SQLite.
    from sqlalchemy.dialects import postgresql

    return postgresql.insert(table)
