"""What all repositories share: a connection, and the way from rows to frozen values.

Statements that run for every call of a plugin or every round are a ``FixedStatement`` each: to build and run
one takes SQLAlchemy longer than it takes the database.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from operator import itemgetter
from typing import Any, ClassVar, Protocol, TypeVar
from uuid import uuid4

from sqlalchemy import ColumnElement, CursorResult, Dialect, Executable, literal_column
from sqlalchemy.orm import InstrumentedAttribute

from nekro_agent.errors import NotFoundError
from storage.fixed_statement import FixedStatement, Row

__all__ = ["Repository", "StatementRunner", "found", "is_one_of", "new_id"]


class _Dataclass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


_Value = TypeVar("_Value", bound=_Dataclass)
AnyStatement = Executable | FixedStatement


def new_id() -> str:
    """Return a fresh id for a row: 32 hexadecimal digits."""
    return uuid4().hex


class StatementRunner(Protocol):
    """What repositories need of a connection; ``storage.connection.LoopConnection`` has it."""

    @property
    def dialect(self) -> Dialect:
        """Which database it is."""
        ...

    @property
    def locked_chats(self) -> dict[str, int | None]:
        """Chats whose rows the transaction has locked, and by which lease if by one.

        To lock one again would be a round trip for nothing.
        """
        ...

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | None = None, /
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run a statement."""
        ...

    async def run(self, statement: FixedStatement, values: Mapping[str, Any]) -> Sequence[Row]:
        """Run a statement whose text never varies; returns its rows."""
        ...


class Repository:
    """Holds the connection of one transaction; neither commits nor logs."""

    def __init__(self, connection: StatementRunner) -> None:
        self._connection = connection
        self._dialect = connection.dialect.name

    async def _one_or_none(
        self, value: type[_Value], statement: AnyStatement, values: Mapping[str, Any] | None = None
    ) -> _Value | None:
        """The value of the one row, of which there are none or one by a key."""
        return next(iter(await self._all(value, statement, values)), None)

    async def _all(
        self, value: type[_Value], statement: AnyStatement, values: Mapping[str, Any] | None = None
    ) -> list[_Value]:
        columns, rows = await self._rows(statement, values)
        read = _reader(value, columns)
        return [read(row) for row in rows]

    async def _scalar(self, statement: AnyStatement, values: Mapping[str, Any] | None = None) -> Any:
        """The one column of the one row; None without a row."""
        _, rows = await self._rows(statement, values)
        return rows[0][0] if rows else None

    async def _rows(
        self, statement: AnyStatement, values: Mapping[str, Any] | None
    ) -> tuple[tuple[str, ...], Sequence[Row]]:
        """The columns' names, and the rows."""
        if isinstance(statement, FixedStatement):
            rows = await self._connection.run(statement, values or {})
            return statement.compiled(self._connection.dialect).columns, rows
        result = await self._connection.execute(statement, values)
        return tuple(result.keys()), result.all()

    async def _count(self, statement: Executable) -> int:
        """How many rows an UPDATE or DELETE touched; an INSERT's drivers count differently."""
        return (await self._connection.execute(statement)).rowcount


def is_one_of(column: InstrumentedAttribute[Any], *states: StrEnum) -> ColumnElement[bool]:
    """SQL: the row is in one of the states, written out as words and not as parameters.

    A partial index fits a query only if the database can see that it does, whatever the values.
    """
    return column.in_([literal_column(f"'{state.value}'") for state in states])


def found(value: _Value | None, noun: str, key: str) -> _Value:
    """Return ``value``.

    Raises:
        NotFoundError: it is None; the message names what was looked for.
    """
    if value is None:
        raise NotFoundError(f"there is no {noun} {key!r}")
    return value


@cache
def _reader(value: type[_Value], columns: tuple[str, ...]) -> Callable[[Row], _Value]:
    """Return what makes a value of a row with these columns.

    By position: to look a column up by its name takes longer than all else that is done for it.
    """
    names = [field.name for field in dataclasses.fields(value)]
    pick = itemgetter(*(columns.index(name) for name in names))

    def read(row: Row) -> _Value:
        return value(**dict(zip(names, pick(row), strict=True)))

    return read
