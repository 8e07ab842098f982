"""The database's clock as SQL expressions: the clock that all workers of a fleet share.

Leases and due times are compared with it, so a worker on a host with a wrong clock neither takes over
live leases nor keeps expired ones.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Dialect, Float, bindparam, literal
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from storage.types import UtcDateTime

__all__ = ["now", "seconds_from_now", "seconds_parameter"]


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
