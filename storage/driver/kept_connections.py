"""Runs single statements on PostgreSQL on connections that stay checked out between statements.

Taking a connection from SQLAlchemy's pool, setting autocommit and returning it costs about as much as
reading a value in PostgreSQL. A kept connection still counts towards the size of the pool, and is
returned as soon as another caller needs it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sqlalchemy import event

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import NekroError
from runtime.completion import complete
from storage.driver import postgresql
from storage.driver.connection import LoopConnection
from storage.driver.limits import acquire
from storage.driver.loop_pool import LoopPool

__all__ = ["KeptConnections"]


class KeptConnections:
    """Runs single statements; implements ``storage.engine.SingleRunner``."""

    def __init__(self, pool: LoopPool, settings: DatabaseSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._driver_error = pool.engine.dialect.loaded_dbapi.Error
        # Waiting here is cheaper for a statement than waiting in SQLAlchemy's pool.
        self._places = asyncio.Semaphore(pool.size)
        self._doubted_at = 0.0
        self._closed = False
        event.listen(pool.engine.sync_engine, "invalidate", self._doubt)

    async def fetch_one(self, sql: str, parameters: Any, *, writes: bool) -> tuple[Any, ...] | None:
        """Run a statement; returns its first row. The driver's errors are not translated.

        Raises:
            StorageUnavailableError: no connection was free in time.
        """
        await acquire(self._places, self._settings.pool_timeout_seconds, self._pool.none_free)
        try:
            connection = await self._take()
            row = await self._fetch_one(connection, sql, parameters)
            await self._keep(connection)
            return row
        finally:
            self._places.release()

    async def close(self) -> None:
        """Keep no more connections; the pool closes those that are idle."""
        self._closed = True

    async def _fetch_one(
        self, connection: LoopConnection, sql: str, parameters: Any
    ) -> tuple[Any, ...] | None:
        driver = connection.driver_connection
        cut = postgresql.cut_later(driver, self._settings.transaction_timeout_seconds)
        try:
            row: tuple[Any, ...] | None = await (await driver.execute(sql, parameters)).fetchone()
            return row
        except self._driver_error:
            if await self._answers(connection):
                await self._keep(connection)
            raise
        except BaseException:
            await complete(connection.throw_away())
            raise
        finally:
            cut.cancel()

    async def _take(self) -> LoopConnection:
        while self._pool.resting:
            connection = self._pool.resting.pop()
            if self._is_trusted(connection) or await self._answers(connection):
                return connection
        return await self._pool.connect(autocommit=True)

    async def _keep(self, connection: LoopConnection) -> None:
        if self._closed or self._pool.is_wanted:
            await connection.close()
            return
        connection.rests_since = time.monotonic()
        self._pool.resting.append(connection)

    def _is_trusted(self, connection: LoopConnection) -> bool:
        since = connection.rests_since
        return since > self._doubted_at and not postgresql.has_rested_long(since)

    async def _answers(self, connection: LoopConnection) -> bool:
        """Ping through SQLAlchemy, which discards a broken connection and recycles all others of its age."""
        cut = postgresql.cut_later(connection.driver_connection, postgresql.ANSWER_SECONDS)
        try:
            await connection.exec_driver_sql("SELECT 1")
        except NekroError:
            await connection.close()
            return False
        except BaseException:
            await complete(connection.throw_away())
            raise
        finally:
            cut.cancel()
        return True

    def _doubt(self, *_: object) -> None:
        """One connection broke, so others may have."""
        self._doubted_at = time.monotonic()
