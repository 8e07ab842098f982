"""The connections of one event loop: those of asyncio drivers belong to the loop that opened them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, cast

from sqlalchemy import exc as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import QueuePool

from nekro_agent.errors import StorageUnavailableError
from storage.connection import LoopConnection
from storage.driver_errors import translated

__all__ = ["LoopPool"]

#: How long ``dispose`` waits for connections that are being closed or rolled back, and for the others.
ENDING_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 3.0

logger = logging.getLogger(__name__)


class LoopPool:
    """SQLAlchemy's pool, and connections that are checked out of it although nobody uses them now."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        #: Connections at rest that whoever appends them may take again; the pool gets them when it is empty.
        self.resting: list[LoopConnection] = []
        #: What is running to close, roll back or give back a connection.
        self.endings: set[asyncio.Task[Any]] = set()
        self._callers = 0

    @property
    def size(self) -> int:
        """How many connections there may be."""
        return self._pool.size()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a connection."""
        return self._callers > 0

    async def connect(self, *, autocommit: bool) -> LoopConnection:
        """Take a connection; the caller closes it.

        Args:
            autocommit: each statement is to be a transaction of its own.

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
        """Return what is raised when there is no connection in time."""
        return StorageUnavailableError(
            f"no database connection was free within {self._pool.timeout()} s; "
            "raise NEKRO_DATABASE__POOL_SIZE or lower the worker's concurrency"
        )

    async def dispose(self) -> None:
        """Close the connections that are not in use, and wait for those that are being closed.

        What cannot be closed in time is left behind and logged: a statement that waits for SQLite's lock
        ends first, and closing may meet a driver that does not answer.
        """
        await self._within(ENDING_SECONDS, self._end_connections())
        await self._within(CLOSE_SECONDS, self.engine.dispose())

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
            "database connections (%d at their end) not closed in %g s; left behind", count, seconds
        )
        task.cancel()

    def abandon(self) -> None:
        """Forget the connections of a loop that has ended; nothing on it can be closed any more."""
        while self.resting:
            # Else the pool would complain of a connection that nobody gave back.
            self.resting.pop().sync_connection.detach()
        self.engine.sync_engine.dispose(close=False)

    @property
    def _pool(self) -> QueuePool:
        # Another one after each `dispose`.
        return cast("QueuePool", self.engine.pool)
