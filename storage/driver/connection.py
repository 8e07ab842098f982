"""What a driver provides, and the runner of SQLAlchemy's statements on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from storage.driver.values import Parameters, Row

if TYPE_CHECKING:
    from sqlalchemy import Dialect, Executable

    from storage.driver.statements import FixedStatement

__all__ = ["Connection", "DriverConnection", "DriverRows", "Rows"]


class DriverRows(NamedTuple):
    """What a driver returns for a statement."""

    rows: Sequence[Row]
    #: How many rows it changed or returned; for INSERT the drivers differ.
    rowcount: int


class DriverConnection(Protocol):
    """A driver's connection; it commits each statement separately outside of ``begin`` and ``commit``.

    Its methods raise our errors. A cancellation is raised when the cancelled statement has ended.
    """

    #: ``time.monotonic`` at the end of the last use; set by the pool.
    rests_since: float

    @property
    def is_idle(self) -> bool:
        """Whether it is open, runs no statement and is outside of a transaction."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether a statement runs, perhaps one whose caller was cancelled."""
        ...

    async def execute(
        self, sql: str, parameters: Parameters | None = None, *, is_short: bool = False
    ) -> DriverRows:
        """Run a statement and fetch all of its rows.

        Args:
            is_short: it takes less time than a call to a thread.
        """
        ...

    async def begin(self) -> None:
        """Begin a transaction with the next statement."""
        ...

    async def commit(self) -> None:
        """Commit the transaction, if a statement began one."""
        ...

    async def rollback(self) -> None:
        """Roll the transaction back, if a statement began one."""
        ...

    async def answers(self) -> bool:
        """Whether the database still answers on an idle connection; discards it otherwise."""
        ...

    def discard(self) -> None:
        """Close it without waiting, also while a statement runs or after its loop has ended."""
        ...

    async def close(self) -> None:
        """Close it."""
        ...


class Rows:
    """All rows of a statement, converted by their column types; methods are named as SQLAlchemy's."""

    __slots__ = ("_rows", "columns", "rowcount")

    def __init__(self, columns: tuple[str, ...], rows: Sequence[Row], rowcount: int) -> None:
        #: Names of the columns; empty for a statement that is plain text.
        self.columns = columns
        self._rows = rows
        #: How many rows an UPDATE or DELETE changed; for INSERT the drivers differ.
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def all(self) -> Sequence[Row]:
        """Return the rows."""
        return self._rows

    def one(self) -> Row:
        """Return the only row; ValueError if there is none or another one."""
        (row,) = self._rows
        return row

    def first(self) -> Row | None:
        """Return the first row; None without a row."""
        return self._rows[0] if self._rows else None

    def scalars(self) -> list[Any]:
        """Return the first column of each row."""
        return [row[0] for row in self._rows]

    def scalar_one(self) -> Any:
        """Return the first column of the only row."""
        return self.one()[0]

    def scalar(self) -> Any:
        """Return the first column of the first row; None without a row."""
        return self._rows[0][0] if self._rows else None


class Connection:
    """Runs the statements of one transaction; do not construct it directly."""

    __slots__ = ("_backend", "driver", "locked_chats")

    def __init__(self, driver: DriverConnection, backend: str) -> None:
        """Create it; ``backend`` is that of ``storage.driver.statements.dialect_of``."""
        self.driver = driver
        self._backend = backend
        #: Chats whose rows the transaction has locked, with the lease's fencing token or None. It saves the
        #: round trip of locking a row again.
        self.locked_chats: dict[str, int | None] = {}

    @property
    def dialect(self) -> Dialect:
        """SQLAlchemy's dialect of the database."""
        # Imported at the first statement of SQLAlchemy: a command that runs texts only does without it.
        from storage.driver.statements import dialect_of

        return dialect_of(self._backend)

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is SQLite (otherwise PostgreSQL)."""
        return self._backend == "sqlite"

    async def execute(
        self, statement: Executable | FixedStatement, values: Mapping[str, Any] | None = None
    ) -> Rows:
        """Run a statement.

        Raises:
            StorageUnavailableError: the database did not run it; see ``errors.is_refusal``.
            ConflictError: a row violates a constraint.
            InvalidValueError: a column type refuses a value.
        """
        from storage.driver.statements import FixedStatement, prepared

        compiled, sql, parameters = prepared(statement, values or {}, self.dialect)
        is_short = isinstance(statement, FixedStatement) and statement.is_short
        rows, rowcount = await self.driver.execute(sql, parameters, is_short=is_short)
        return Rows(compiled.columns, compiled.rows(rows), rowcount)

    async def exec_driver_sql(self, sql: str, parameters: Parameters | None = None) -> Rows:
        """Run SQL text unchanged; parameters use the driver's own style."""
        rows, rowcount = await self.driver.execute(sql, parameters)
        return Rows((), rows, rowcount)
