"""Fixed statements: SQL whose text never varies, compiled once and run directly on the driver.

SQLAlchemy takes several times as long as the database to run a statement. Statements that run for every
call, round or plugin value therefore bypass it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, Dialect, Executable, Float
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ClauseElement, ReturnsRows
from sqlalchemy.sql.schema import ScalarElementColumnDefault
from sqlalchemy.types import TypeEngine

__all__ = ["DriverStatement", "FixedStatement", "Row", "SingleStatement"]

#: The values of one row, in the order of the statement's columns.
Row = tuple[Any, ...]

_Processor = Callable[[Any], Any]


class DriverStatement(NamedTuple):
    """SQL text for one driver, with the conversions of its parameters and results."""

    sql: str
    #: The parameters in the driver's order, each with the conversion of its column type, if any.
    parameters_of: tuple[tuple[str, _Processor | None], ...]
    #: Parameters with a value fixed by the statement, already converted for the driver.
    constants: dict[str, Any]
    by_name: bool
    #: Names of the returned columns; empty when it returns no rows.
    columns: tuple[str, ...]
    #: Positions of the columns whose types convert results, with the conversion.
    results_of: tuple[tuple[int, _Processor], ...]

    def parameters(self, values: Mapping[str, Any]) -> tuple[Any, ...] | dict[str, Any]:
        """Return the values in the form that the driver accepts.

        Raises:
            InvalidValueError: a column type refuses a value.
        """
        given = {**self.constants, **values} if self.constants else values
        if self.by_name:
            return {
                name: process(given[name]) if process else given[name] for name, process in self.parameters_of
            }
        return tuple(
            [process(given[name]) if process else given[name] for name, process in self.parameters_of]
        )

    def rows(self, raw: Sequence[Row]) -> Sequence[Row]:
        """Return the driver's rows, converted by their column types."""
        if not self.results_of:
            return raw
        changed = []
        for row in raw:
            values = list(row)
            for position, process in self.results_of:
                values[position] = process(values[position])
            changed.append(tuple(values))
        return changed


class FixedStatement:
    """A statement that is built and compiled once per process and database.

    Its parameters are ``bindparam``; lists of varying length are not supported.
    """

    def __init__(self, build: Callable[[str], Executable]) -> None:
        """Store the builder; the class can be used as a decorator of the function.

        Args:
            build: builds the statement for the name of a dialect; called at the first use.
        """
        self._build = build
        self._compiled: dict[str, DriverStatement] = {}

    def compiled(self, dialect: Dialect) -> DriverStatement:
        """Return the compiled statement for a dialect."""
        known = self._compiled.get(dialect.name)
        if known is None:
            known = self._compiled[dialect.name] = _compile(self._build(dialect.name), dialect)
        return known


class SingleStatement(FixedStatement):
    """A statement for ``Database.run``: its own transaction, returning one column of at most one row."""

    def __init__(self, build: Callable[[str], Executable], *, writes: bool) -> None:
        """As ``FixedStatement``; ``writes`` means that the statement must wait for other writers."""
        super().__init__(build)
        self.writes = writes


def _compile(statement: Executable, dialect: Dialect) -> DriverStatement:
    assert isinstance(statement, ClauseElement)  # noqa: S101 - every statement that SQLAlchemy builds is one
    compiled = statement.compile(dialect=dialect)
    assert isinstance(compiled, SQLCompiler)  # noqa: S101 - DDL is never run this way
    binds = {name: bind for bind, name in compiled.bind_names.items()}
    change_in = {name: _on_driver(bind.type, dialect).bind_processor(dialect) for name, bind in binds.items()}
    given = {name: bind.value for name, bind in binds.items() if not bind.required}
    # SQLAlchemy would add these defaults when it runs the statement.
    given |= {str(column.key): _default(column) for column in compiled.insert_prefetch}
    columns: dict[str, ColumnElement[Any]] = {}
    if isinstance(statement, ReturnsRows):
        columns.update(statement.exported_columns.items())
    change_out = [_result_processor(column.type, dialect) for column in columns.values()]
    return DriverStatement(
        sql=compiled.string,
        parameters_of=tuple(
            (name, None if name in given else change_in[name]) for name in compiled.positiontup or binds
        ),
        constants={name: (change_in[name] or _as_it_is)(value) for name, value in given.items()},
        by_name=compiled.positiontup is None,
        columns=tuple(columns),
        results_of=tuple((at, change) for at, change in enumerate(change_out) if change is not None),
    )


def _on_driver(kind: TypeEngine[Any], dialect: Dialect) -> TypeEngine[Any]:
    return kind.dialect_impl(dialect)


def _result_processor(kind: TypeEngine[Any], dialect: Dialect) -> _Processor | None:
    if isinstance(kind, Float):
        # Both drivers return floats; SQLAlchemy's processor would inspect psycopg's type code.
        return None
    return _on_driver(kind, dialect).result_processor(dialect, None)


def _default(column: Column[Any]) -> Any:
    assert isinstance(column.default, ScalarElementColumnDefault)  # noqa: S101 - no model has a computed default
    return column.default.arg


def _as_it_is(value: Any) -> Any:
    return value
