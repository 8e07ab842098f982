"""A database connection on an event loop.

SQLAlchemy's ``AsyncConnection`` creates a new greenlet for each step (connect, execute, close), which
costs tens of microseconds. This connection reuses its greenlets.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Dialect, Executable
from sqlalchemy.ext.asyncio import AsyncEngine

from nekro_agent.errors import NekroError
from runtime.completion import complete
from runtime.greenlet_bridge import spawn, spawn_cleanly
from storage.driver.errors import translated_from_driver
from storage.driver.fixed_statement import FixedStatement, Row

__all__ = ["LoopConnection"]

T = TypeVar("T")


class LoopConnection:
    """The subset of ``AsyncConnection`` that storage uses, under the same names.

    A cancellation stops the awaited step and discards the connection. Even after repeated cancellations
    the caller resumes only when the connection is closed: a half-closed connection that is used again
    fails other callers' statements and may crash SQLite's driver.
    """

    def __init__(
        self, engine: AsyncEngine, endings: set[asyncio.Task[Any]], *, autocommit: bool = False
    ) -> None:
        """Store the options; ``start`` opens the connection.

        Args:
            endings: the pool's set of running tasks that close or return a connection.
            autocommit: the driver commits each statement separately.
        """
        self._engine = engine
        self._autocommit = autocommit
        self._endings = endings
        self._started: Connection | None = None
        #: The pool it was taken from; the engine has another one after each ``dispose``.
        self._pool = engine.sync_engine.pool
        #: ``time.monotonic`` at the end of the last use; set by a caller that keeps the connection.
        self.rests_since = 0.0
        #: As in ``storage.repositories.base.StatementRunner``; a connection object serves one transaction.
        self.locked_chats: dict[str, int | None] = {}

    @property
    def dialect(self) -> Dialect:
        """The SQL dialect of the database."""
        return self._engine.dialect

    @property
    def sync_connection(self) -> Connection:
        """The underlying SQLAlchemy connection, for use inside ``run_sync``.

        Raises:
            RuntimeError: ``start`` has not been called.
        """
        if self._started is None:
            raise RuntimeError("the connection has not been started")
        return self._started

    @property
    def closed(self) -> bool:
        """Whether it was returned to its pool."""
        return self.sync_connection.closed

    @property
    def invalidated(self) -> bool:
        """Whether it is broken and must not be used again."""
        return self.sync_connection.invalidated

    @property
    def driver_connection(self) -> Any:
        """The driver's own connection."""
        return self.sync_connection.connection.driver_connection

    async def start(self) -> None:
        """Take a connection from the pool, or open one if the pool is not full; keeps none when it raises."""
        try:
            await spawn_cleanly(self._start)
        except BaseException:
            await complete(self.throw_away(), among=self._endings)
            raise

    def _start(self) -> None:
        self._pool = self._engine.sync_engine.pool
        self._started = self._engine.sync_engine.connect()
        if self._autocommit:
            # Not an option of the engine: its ``connect`` would leak the connection if this step fails.
            self._started.execution_options(isolation_level="AUTOCOMMIT")

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | None = None, /
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run a statement; all rows have been fetched when this returns."""
        return await spawn_cleanly(self.sync_connection.execute, statement, parameters)

    async def run(self, statement: FixedStatement, values: Mapping[str, Any]) -> Sequence[Row]:
        """Run a statement directly on the driver; returns its rows, empty if it returns none.

        Inside ``Database.begin``, SQLAlchemy's ``begin`` must come first, because only that causes a commit.
        """
        on_driver = statement.compiled(self.dialect)
        parameters = on_driver.parameters(values)
        try:
            cursor = await self.driver_connection.execute(on_driver.sql, parameters)
            rows = await cursor.fetchall() if on_driver.columns else ()
        except self.dialect.loaded_dbapi.Error as exc:
            raise await self._refused(exc) from exc
        except BaseException:
            # The state of the statement is not known.
            await self.invalidate()
            raise
        return on_driver.rows(rows)

    async def _refused(self, error: Any) -> NekroError:
        """Return our error for a driver's error; lets SQLAlchemy detect a broken connection."""
        if self.dialect.is_disconnect(error, self.sync_connection.connection.dbapi_connection, None):
            with contextlib.suppress(NekroError):
                await self.exec_driver_sql("SELECT 1")
        return translated_from_driver(error, self.dialect)

    async def exec_driver_sql(
        self, statement: str, parameters: Any = None, /
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run SQL text unchanged; parameters use the driver's own style."""
        return await spawn_cleanly(self.sync_connection.exec_driver_sql, statement, parameters)

    async def run_sync(self, function: Callable[[Connection], T]) -> T:
        """Run a function on the underlying SQLAlchemy connection."""
        return await spawn_cleanly(function, self.sync_connection)

    async def commit(self) -> None:
        """Commit."""
        await spawn_cleanly(self.sync_connection.commit)

    async def rollback(self) -> None:
        """Roll back."""
        await spawn_cleanly(self.sync_connection.rollback)

    async def invalidate(self) -> None:
        """Discard the connection instead of returning it; a cancellation waits until that is done."""
        await complete(spawn(self.sync_connection.invalidate), among=self._endings)

    async def throw_away(self) -> None:
        """Discard the connection and free its slot in the pool; does nothing before ``start``."""
        if self._started is not None:
            await self.invalidate()
            await self.close()

    async def close(self) -> None:
        """Return the connection to its pool; a cancellation waits. Does nothing before ``start``."""
        if self._started is not None:
            await complete(spawn(self._give_back, self._started), among=self._endings)

    def _give_back(self, started: Connection) -> None:
        # A pool that was disposed closes nothing of what it is given afterwards.
        if self._pool is not self._engine.sync_engine.pool and not started.closed:
            started.invalidate()
        started.close()
