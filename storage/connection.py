"""A database connection on an event loop.

SQLAlchemy's own ``AsyncConnection`` makes a new greenlet for each step (connect, execute, close), which
costs tens of microseconds. This one's are kept for the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Dialect, Executable
from sqlalchemy.ext.asyncio import AsyncEngine

from broker_config.bridge import spawn, spawn_cleanly
from broker_config.completion import complete
from nekro_agent.errors import NekroError
from storage.driver_errors import translated_from_driver
from storage.fixed_statement import FixedStatement, Row

__all__ = ["LoopConnection"]

T = TypeVar("T")


class LoopConnection:
    """What storage uses of ``AsyncConnection``, under the same names.

    A cancellation ends what is awaited and throws the connection away. However many follow, whoever
    awaits it goes on only when the connection is closed: one that is closed by halves and used again
    fails the statements of others and may crash SQLite's driver.
    """

    def __init__(
        self, engine: AsyncEngine, endings: set[asyncio.Task[Any]], *, autocommit: bool = False
    ) -> None:
        """Open nothing yet.

        Args:
            endings: the pool's; holds what is running to close or give back a connection.
            autocommit: the driver makes each statement a transaction of its own.
        """
        self._engine = engine
        self._autocommit = autocommit
        self._endings = endings
        self._started: Connection | None = None
        #: By ``time.monotonic``; for whoever keeps it between uses.
        self.rests_since = 0.0
        #: As in ``storage.repository.StatementRunner``; a connection object serves one transaction.
        self.locked_chats: dict[str, int | None] = {}

    @property
    def dialect(self) -> Dialect:
        """Which database it is."""
        return self._engine.dialect

    @property
    def sync_connection(self) -> Connection:
        """The connection below, for use inside ``run_sync``.

        Raises:
            RuntimeError: ``start`` has not been called.
        """
        if self._started is None:
            raise RuntimeError("the connection has not been started")
        return self._started

    @property
    def closed(self) -> bool:
        """Whether it is back in its pool."""
        return self.sync_connection.closed

    @property
    def invalidated(self) -> bool:
        """Whether it broke and is not used again."""
        return self.sync_connection.invalidated

    @property
    def driver_connection(self) -> Any:
        """The driver's own connection."""
        return self.sync_connection.connection.driver_connection

    async def start(self) -> None:
        """Take a connection from the pool; opens one where there is room. Keeps none when it raises."""
        try:
            await spawn_cleanly(self._start)
        except BaseException:
            await complete(self.throw_away(), among=self._endings)
            raise

    def _start(self) -> None:
        self._started = self._engine.sync_engine.connect()
        if self._autocommit:
            # Not by an option of the engine: its ``connect`` loses the connection when this step fails.
            self._started.execution_options(isolation_level="AUTOCOMMIT")

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | None = None, /
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run a statement; its rows have been read when this returns."""
        return await spawn_cleanly(self.sync_connection.execute, statement, parameters)

    async def run(self, statement: FixedStatement, values: Mapping[str, Any]) -> Sequence[Row]:
        """Run a statement on the driver itself; returns its rows, none where it returns no rows.

        In ``Database.begin`` only after SQLAlchemy's ``begin``, which alone makes it commit.
        """
        on_driver = statement.compiled(self.dialect)
        parameters = on_driver.parameters(values)
        try:
            cursor = await self.driver_connection.execute(on_driver.sql, parameters)
            rows = await cursor.fetchall() if on_driver.columns else ()
        except self.dialect.loaded_dbapi.Error as exc:
            raise await self._refused(exc) from exc
        except BaseException:
            # How far the statement came is not known.
            await self.invalidate()
            raise
        return on_driver.rows(rows)

    async def _refused(self, error: Any) -> NekroError:
        """Return our error for a driver's; where the connection broke SQLAlchemy learns of it."""
        if self.dialect.is_disconnect(error, self.sync_connection.connection.dbapi_connection, None):
            with contextlib.suppress(NekroError):
                await self.exec_driver_sql("SELECT 1")
        return translated_from_driver(error, self.dialect)

    async def exec_driver_sql(
        self, statement: str, parameters: Any = None, /
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run SQL text as it is; parameters in the driver's own style."""
        return await spawn_cleanly(self.sync_connection.exec_driver_sql, statement, parameters)

    async def run_sync(self, function: Callable[[Connection], T]) -> T:
        """Run a function that works on the connection below."""
        return await spawn_cleanly(function, self.sync_connection)

    async def commit(self) -> None:
        """Commit."""
        await spawn_cleanly(self.sync_connection.commit)

    async def rollback(self) -> None:
        """Roll back."""
        await spawn_cleanly(self.sync_connection.rollback)

    async def invalidate(self) -> None:
        """Throw the connection away instead of giving it back; a cancellation waits until that is done."""
        await complete(spawn(self.sync_connection.invalidate), among=self._endings)

    async def throw_away(self) -> None:
        """Invalidate it and give its place back to the pool; does nothing before ``start``."""
        if self._started is not None:
            await self.invalidate()
            await self.close()

    async def close(self) -> None:
        """Give it back to its pool, as ``invalidate`` does; does nothing before ``start``."""
        if self._started is not None:
            await complete(spawn(self._started.close), among=self._endings)
