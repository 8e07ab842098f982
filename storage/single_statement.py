"""A statement that is a transaction of its own, in the words of a driver.

What plugins store is read and written more often than all else, and SQLAlchemy takes several times as long
to run such a statement as the database does. ``Database.run`` gives these to the driver itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Dialect
from sqlalchemy.sql.expression import ReturnsRows
from sqlalchemy.types import TypeEngine

__all__ = ["DriverStatement", "SingleStatement"]

_Processor = Callable[[Any], Any]


class DriverStatement(NamedTuple):
    """SQL text for one driver, and how column types change what goes in and comes out."""

    sql: str
    #: The parameters in the driver's order, each with its column type's way to change it.
    parameters_of: tuple[tuple[str, _Processor | None], ...]
    #: The values of parameters that the statement itself gives.
    constants: dict[str, Any]
    by_name: bool
    result_processor: _Processor | None

    def parameters(self, values: Mapping[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
        """Return the values as the driver takes them.

        Raises:
            InvalidValueError: a column type refuses one.
        """
        given = {**self.constants, **values} if self.constants else values
        if self.by_name:
            return {
                name: process(given[name]) if process else given[name] for name, process in self.parameters_of
            }
        return tuple(
            [process(given[name]) if process else given[name] for name, process in self.parameters_of]
        )

    def value(self, row: tuple[Any, ...] | None) -> Any:
        """Return the one column of the row; None without a row."""
        if row is None:
            return None
        return row[0] if self.result_processor is None else self.result_processor(row[0])


class SingleStatement:
    """Gives one column of one row, or no row; compiled once per process and database."""

    def __init__(self, build: Callable[[str], ReturnsRows], *, writes: bool) -> None:
        """Build nothing yet.

        Args:
            build: gets the name of the dialect.
        """
        self.writes = writes
        self._build = build
        self._compiled: dict[str, DriverStatement] = {}

    def compiled(self, dialect: Dialect) -> DriverStatement:
        """Return what the driver gets."""
        known = self._compiled.get(dialect.name)
        if known is None:
            known = self._compiled[dialect.name] = _compile(self._build(dialect.name), dialect)
        return known


def _compile(statement: ReturnsRows, dialect: Dialect) -> DriverStatement:
    (column,) = statement.exported_columns
    compiled = statement.compile(dialect=dialect)
    return DriverStatement(
        sql=compiled.string,
        parameters_of=tuple(
            (name, _on_driver(compiled.binds[name].type, dialect).bind_processor(dialect))
            for name in compiled.positiontup or compiled.binds
        ),
        constants={name: bind.value for name, bind in compiled.binds.items() if not bind.required},
        by_name=compiled.positiontup is None,
        result_processor=_on_driver(column.type, dialect).result_processor(dialect, None),
    )


def _on_driver(kind: TypeEngine[Any], dialect: Dialect) -> TypeEngine[Any]:
    return kind.dialect_impl(dialect)
