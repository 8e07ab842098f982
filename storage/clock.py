"""The database's clock, as SQL: the one clock that all workers of a fleet share.

Leases and due times are compared with it, so a host whose own clock is wrong neither takes over
what is alive nor keeps what is dead.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Float, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from storage.types import UtcDateTime

__all__ = ["now", "seconds_from_now"]


class now(FunctionElement[datetime]):
    """When the statement began."""

    type = UtcDateTime()
    inherit_cache = True


class _later(FunctionElement[datetime]):
    type = UtcDateTime()
    inherit_cache = True


def seconds_from_now(seconds: float) -> ColumnElement[datetime]:
    """The statement's time plus ``seconds``; negative means before."""
    # Milliseconds, because SQLite knows no finer ones and reads no exponents.
    return _later(literal(round(float(seconds), 3), Float))


@compiles(now, "postgresql")
def _now_postgresql(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    return "statement_timestamp()"


@compiles(now, "sqlite")
def _now_sqlite(_element: now, _compiler: SQLCompiler, **_options: Any) -> str:
    # The format that SQLAlchemy writes, so that texts compare as times do.
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


@compiles(_later, "postgresql")
def _later_postgresql(element: _later, compiler: SQLCompiler, **options: Any) -> str:
    return f"(statement_timestamp() + make_interval(secs => {compiler.process(element.clauses, **options)}))"


@compiles(_later, "sqlite")
def _later_sqlite(element: _later, compiler: SQLCompiler, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now', {seconds} || ' seconds') || '000')"
