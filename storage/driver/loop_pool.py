"""The connection pool of one event loop: asyncio connections belong to the loop that opened them."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Coroutine
from typing import Any, cast

from sqlalchemy import event
from sqlalchemy import exc as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import StorageUnavailableError
from storage.driver.connection import LoopConnection
from storage.driver.errors import translated

__all__ = ["LoopPool"]


logger = logging.getLogger(__name__)


class LoopPool:
    """SQLAlchemy's pool, and idle connections that stay checked out of it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        #: Idle connections that ``KeptConnections`` reuses; returned to the pool when it is exhausted.
        self.resting: list[LoopConnection] = []
        #: Running tasks that close, roll back or return a connection.
        self.endings: set[asyncio.Task[Any]] = set()
        self._callers = 0
        #: The driver's connections, those in use included.
        self._opened: weakref.WeakSet[Any] = weakref.WeakSet()
        event.listen(engine.sync_engine, "connect", self._remember)

    @property
    def size(self) -> int:
        """Maximum number of connections."""
        return self._pool.size()

    @property
    def is_wanted(self) -> bool:
        """Whether a caller is waiting for a connection."""
        return self._callers > 0

    async def connect(self, *, autocommit: bool) -> LoopConnection:
        """Take a connection; the caller closes it.

        Args:
            autocommit: whether each statement is committed separately.

        Raises:
            StorageUnavailableError: none was free in time, or the database does not answer.
        """
        if self.resting and self._pool.checkedout() >= self.size:
            await self.resting.pop(0).close()
        connection = LoopConnection(self.engine, self.endings, autocommit=autocommit)
        self._callers += 1
        try:
            await connection.start()
        except sa.TimeoutError as exc:
            raise self.none_free() from exc
        except sa.SQLAlchemyError as exc:
            raise translated(exc) from exc
        finally:
            self._callers -= 1
        return connection

    def none_free(self) -> StorageUnavailableError:
        """Return the error for a connection that did not become free in time."""
        return StorageUnavailableError(
            f"no database connection was free within {self._pool.timeout()} s; "
            "raise NEKRO_DATABASE__POOL_SIZE or lower the worker's concurrency"
        )

    async def dispose(self) -> None:
        """Close the connections that are not in use, and wait for those that are being closed.

        Connections that cannot be closed in time are abandoned with a warning: a statement that waits for
        SQLite's lock must end first, and a driver may not respond.
        """
        await self._within(CLOSE_STEP_SECONDS, self._end_connections())
        await self._within(CLOSE_STEP_SECONDS, self.engine.dispose())

    async def _end_connections(self) -> None:
        while self.resting:
            await self.resting.pop().close()
        while self.endings:
            await asyncio.wait(self.endings)

    async def _within(self, seconds: float, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        if (await asyncio.wait({task}, timeout=seconds))[0]:
            return task.result()
        count = len(self.endings)
        logger.warning(
            "database connections (%d still closing) were not closed within %g s; abandoned", count, seconds
        )
        task.cancel()

    def abandon(self) -> None:
        """Drop the connections of a loop that has ended; PostgreSQL's are closed, which needs no loop."""
        if self.engine.dialect.name == "postgresql":
            for connection in self._opened:
                connection.pgconn.finish()
        while self.resting:
            # Otherwise the pool would warn about a connection that was not returned.
            self.resting.pop().sync_connection.detach()
        self.engine.sync_engine.dispose(close=False)

    def _remember(self, _connection: object, entry: ConnectionPoolEntry) -> None:
        self._opened.add(entry.driver_connection)

    @property
    def _pool(self) -> QueuePool:
        # `dispose` replaces the engine's pool.
        return cast("QueuePool", self.engine.pool)
