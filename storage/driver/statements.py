"""SQLAlchemy's statements as drivers take them: text, parameters, and the conversions of both directions.

SQLAlchemy takes several times as long as the database to build and compile a statement, so compiled
statements are kept. A ``FixedStatement`` is built once too; statements that run for every call, round or
plugin value are of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar, Final, cast

from sqlalchemy import ColumnElement, Dialect, Executable, Float, make_url
from sqlalchemy.sql.compiler import Compiled, SQLCompiler
from sqlalchemy.sql.expression import ClauseElement, ReturnsRows
from sqlalchemy.sql.schema import ScalarElementColumnDefault
from sqlalchemy.types import TypeEngine

from storage.driver.values import Parameters, Row

__all__ = [
    "DriverStatement",
    "FixedStatement",
    "ListStatement",
    "SingleStatement",
    "dialect_of",
    "prepared",
]

_Processor = Callable[[Any], Any]

#: Most statements that are kept; all are dropped when there are more.
_MAX_KEPT: Final = 500


@cache
def dialect_of(backend: str) -> Dialect:
    """Return SQLAlchemy's dialect of a backend, ``sqlite`` or ``postgresql+psycopg``."""
    kind = make_url(f"{backend}://").get_dialect()
    return kind(dbapi=kind.import_dbapi())  # type: ignore[call-arg]  # declared by its subclasses only


class DriverStatement:
    """A compiled statement with the conversions of its parameters and results."""

    def __init__(self, statement: ClauseElement, compiler: SQLCompiler, dialect: Dialect) -> None:
        binds = {name: bind for bind, name in compiler.bind_names.items()}
        #: The text; it differs for each run if a parameter is a list of values.
        self.sql = compiler.string
        self.compiler = compiler
        #: Conversions of parameters, by name; None where the value is passed unchanged.
        self._change_in = {
            name: _on_driver(bind.type, dialect).bind_processor(dialect) for name, bind in binds.items()
        }
        #: SQLAlchemy would add these values when it runs the statement.
        self._defaults = {
            str(column.key): cast(ScalarElementColumnDefault, column.default).arg
            for column in compiler.insert_prefetch
        }
        self._by_name = compiler.positiontup is None
        self._order = tuple(compiler.positiontup or binds)
        columns: list[tuple[str, ColumnElement[Any]]] = []
        if isinstance(statement, ReturnsRows):
            columns.extend(statement.exported_columns.items())
        #: Names of the returned columns; empty when it returns no rows, and for plain text.
        self.columns = tuple(name for name, _ in columns)
        change_out = [_result_processor(column.type, dialect) for _, column in columns]
        self._results_of = tuple((at, change) for at, change in enumerate(change_out) if change is not None)

    def parameters(self, values: Mapping[str, Any]) -> Parameters:
        """Return the parameters of a run whose text does not vary.

        Raises:
            InvalidValueError: a column type refuses a value.
        """
        constants, order = self._fixed
        given = {**constants, **values} if constants else values
        if self._by_name:
            return {name: process(given[name]) if process else given[name] for name, process in order}
        return tuple([process(given[name]) if process else given[name] for name, process in order])

    def text_and_parameters(self, values: Mapping[str, Any]) -> tuple[str, Parameters]:
        """Return text and parameters of a run, with a parameter for each element of lists.

        Args:
            values: those of all parameters.

        Raises:
            InvalidValueError: a column type refuses a value.
        """
        values = {**values, **self._defaults} if self._defaults else values
        if not self.compiler.post_compile_params:
            converted = {name: self._converted(name, values[name]) for name in self._order}
            return self.sql, converted if self._by_name else tuple([converted[name] for name in self._order])
        run = self.compiler.construct_expanded_state(values, escape_names=False)
        # The state has the conversions of the values in the lists only.
        change_in = {**self._change_in, **run.processors}
        converted = {
            name: process(value) if (process := change_in.get(name)) else value
            for name, value in run.parameters.items()
        }
        if run.positiontup is None:
            return run.statement, converted
        return run.statement, tuple([converted[name] for name in run.positiontup])

    def rows(self, raw: Sequence[Row]) -> Sequence[Row]:
        """Return the driver's rows, converted by their column types."""
        if not self._results_of:
            return raw
        changed = []
        for row in raw:
            values = list(row)
            for position, process in self._results_of:
                values[position] = process(values[position])
            changed.append(tuple(values))
        return changed

    @cached_property
    def _fixed(self) -> tuple[dict[str, Any], tuple[tuple[str, _Processor | None], ...]]:
        """Values that the statement contains, converted, and all parameters with their conversion."""
        given = {name: bind.value for bind, name in self.compiler.bind_names.items() if not bind.required}
        constants = {name: self._converted(name, value) for name, value in (given | self._defaults).items()}
        order = [(name, None if name in constants else self._change_in[name]) for name in self._order]
        return constants, tuple(order)

    def _converted(self, name: str, value: Any) -> Any:
        process = self._change_in[name]
        return value if process is None else process(value)


class FixedStatement:
    """A statement that is built and compiled once per process and database.

    Its parameters are ``bindparam``; lists of varying length are not supported.
    """

    #: Whether it takes less time than a call to a thread.
    is_short: ClassVar[bool] = True

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
            statement = cast(ClauseElement, self._build(dialect.name))
            compiler = cast(SQLCompiler, statement.compile(dialect=dialect))
            known = self._compiled[dialect.name] = DriverStatement(statement, compiler, dialect)
        return known


class ListStatement(FixedStatement):
    """A statement that may return many rows, so that the loop does not wait for it."""

    is_short = False


class SingleStatement(FixedStatement):
    """A statement for ``Database.run``: its own transaction, returning one column of at most one row."""

    def __init__(self, build: Callable[[str], Executable], *, writes: bool) -> None:
        """As ``FixedStatement``; ``writes`` means that the statement must wait for other writers."""
        super().__init__(build)
        self.writes = writes


#: SQLAlchemy's cache of compiled statements, by structure.
_compiled: dict[Any, Compiled] = {}
_on_drivers: dict[Compiled, DriverStatement] = {}


def prepared(
    statement: Executable | FixedStatement, values: Mapping[str, Any], dialect: Dialect
) -> tuple[DriverStatement, str, Parameters]:
    """Return the compiled statement, and the text and parameters of a run with these values.

    Raises:
        InvalidValueError: a column type refuses a value.
    """
    if isinstance(statement, FixedStatement):
        on_driver = statement.compiled(dialect)
        return on_driver, on_driver.sql, on_driver.parameters(values)
    clause = cast(ClauseElement, statement)
    if len(_compiled) >= _MAX_KEPT:
        _compiled.clear()
        _on_drivers.clear()
    # SQLAlchemy's own engines call this; there is no public way to its cache.
    found, extracted, *_ = clause._compile_w_cache(
        dialect, compiled_cache=_compiled, column_keys=sorted(values)
    )
    compiler = cast(SQLCompiler, found)
    known = _on_drivers.get(compiler)
    if known is None:
        known = _on_drivers[compiler] = DriverStatement(clause, compiler, dialect)
    whole = compiler.construct_params(values, extracted_parameters=extracted, escape_names=False)
    return known, *known.text_and_parameters(whole)


def _on_driver(kind: TypeEngine[Any], dialect: Dialect) -> TypeEngine[Any]:
    return kind.dialect_impl(dialect)


def _result_processor(kind: TypeEngine[Any], dialect: Dialect) -> _Processor | None:
    if isinstance(kind, Float):
        # Both drivers return floats; SQLAlchemy's processor would inspect psycopg's type code.
        return None
    return _on_driver(kind, dialect).result_processor(dialect, None)
