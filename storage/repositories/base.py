"""Base class of all repositories: a connection, and the conversion of rows to frozen values.

Statements that run for every plugin call or every round are a ``FixedStatement``, because SQLAlchemy
takes longer to build one than the database to run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar, Protocol, TypeVar

from sqlalchemy import ColumnElement, Executable, Select, Table, bindparam, literal_column, select

from nekro_agent.errors import NotFoundError
from storage.driver.connection import Connection, Rows
from storage.driver.statements import FixedStatement
from storage.driver.values import Row

__all__ = [
    "Repository",
    "chosen_once",
    "columns_of",
    "found",
    "is_one_of",
    "parameters_of",
    "values_of",
]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


_Value = TypeVar("_Value", bound=_Dataclass)
AnyStatement = Executable | FixedStatement


class Repository:
    """Works on the connection of one transaction; neither commits nor logs."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._dialect = connection.dialect.name

    async def _one_or_none(
        self, value: type[_Value], statement: AnyStatement, values: Mapping[str, Any] | None = None
    ) -> _Value | None:
        """Return the value of a statement that returns at most one row."""
        return next(iter(await self._all(value, statement, values)), None)

    async def _all(
        self, value: type[_Value], statement: AnyStatement, values: Mapping[str, Any] | None = None
    ) -> list[_Value]:
        return self._values(value, await self._rows(statement, values))

    @staticmethod
    def _values(value: type[_Value], rows: Rows) -> list[_Value]:
        return list(map(_reader(value, rows.columns), rows))

    async def _scalar(self, statement: AnyStatement, values: Mapping[str, Any] | None = None) -> Any:
        """Return the first column of the first row; None without a row."""
        return (await self._rows(statement, values)).scalar()

    async def _rows(self, statement: AnyStatement, values: Mapping[str, Any] | None = None) -> Rows:
        return await self._connection.execute(statement, values)

    async def _count(self, statement: AnyStatement, values: Mapping[str, Any] | None = None) -> int:
        """Return how many rows an UPDATE or DELETE changed; for INSERT the drivers differ."""
        return (await self._connection.execute(statement, values)).rowcount


def is_one_of(column: ColumnElement[Any], *states: StrEnum) -> ColumnElement[bool]:
    """SQL: the row is in one of the states, written as literals instead of parameters.

    The database uses a partial index only if the query implies the index's condition for any parameters.
    """
    return column.in_([literal_column(f"'{state.value}'") for state in states])


def chosen_once(chosen: Select[Any]) -> Select[Any]:
    """SQL: the keys that ``chosen`` selects, for the ``IN`` of an UPDATE that returns what it changed.

    PostgreSQL may run the subquery of an ``IN`` once per row of the outer table. With ``LIMIT`` and
    ``FOR UPDATE SKIP LOCKED`` each run skips the row that the statement has just updated and locks another
    one, so the statement takes more rows than the limit. A materialized CTE runs once, whatever the plan.
    """
    keys = chosen.cte("chosen").prefix_with("MATERIALIZED", dialect="postgresql")
    return select(*keys.c)


def values_of(record: _Dataclass, kind: type[_Dataclass]) -> dict[str, Any]:
    """Return the values of a record by column; ``kind`` is its type, or a base class with fewer columns."""
    return {name: getattr(record, name) for name in _names(kind)}


def parameters_of(kind: type[_Dataclass]) -> dict[str, Any]:
    """Return a parameter of a ``FixedStatement`` per column, for what ``values_of`` returns."""
    return {name: bindparam(name) for name in _names(kind)}


def columns_of(table: Table, kind: type[_Dataclass]) -> list[ColumnElement[Any]]:
    """Return the columns that make a ``kind``."""
    return [table.c[name] for name in _names(kind)]


def found(value: _Value | None, noun: str, key: str) -> _Value:
    """Return ``value``.

    Raises:
        NotFoundError: it is None; the message contains ``noun`` and ``key``.
    """
    if value is None:
        raise NotFoundError(f"there is no {noun} {key!r}")
    return value


@cache
def _names(kind: type[_Dataclass]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _reader(value: type[_Value], columns: tuple[str, ...]) -> Callable[[Row], _Value]:
    """Return a function that converts a row with these columns to a value.

    It picks columns by position, because looking them up by name would take longer than everything else.
    """
    names = _names(value)
    pick = itemgetter(*(columns.index(name) for name in names))

    def read(row: Row) -> _Value:
        return value(**dict(zip(names, pick(row), strict=True)))

    return read
