"""PostgreSQL: psycopg, with time limits and detection of stale connections before use.

A pooler in transaction mode gives a connection another server process for each transaction and for each
statement outside of one. Nothing here relies on what a session keeps then: psycopg prepares no statements,
BEGIN sets the time limits of its transaction, and a single statement that takes too long is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.driver.blocking import ANSWER_SECONDS, begin_text, connect_arguments, has_one_server
from storage.driver.connection import DriverRows
from storage.driver.errors import NotBegunError, translated
from storage.driver.pool import Pool, connection_semaphore
from storage.driver.urls import PoolMode, database_url, libpq_url, pool_mode
from storage.driver.values import Parameters

__all__ = ["PostgresConnection", "postgres_pool"]

T = TypeVar("T")

#: How long the error of a cancelled statement may take before its connection is shut down.
_CANCEL_SECONDS: Final = 0.5


def postgres_pool(settings: DatabaseSettings, data_dir: Path) -> Pool[PostgresConnection]:
    """Return the pool of an event loop; nothing is opened."""
    arguments = _arguments(settings, data_dir)
    begin = begin_text(settings).encode()
    has_session = pool_mode(settings) is PoolMode.SESSION

    async def connect() -> PostgresConnection:
        try:
            connection = await psycopg.AsyncConnection.connect(autocommit=True, **arguments)
            return PostgresConnection(connection, begin=begin, has_session=has_session)
        except psycopg.Error as exc:
            raise translated(exc) from exc

    return Pool(
        connect,
        connection_semaphore(settings.pool_size, settings),
        cut_later=lambda connection: connection.cut_later(settings.transaction_timeout_seconds),
    )


def _arguments(settings: DatabaseSettings, data_dir: Path) -> dict[str, Any]:
    conninfo = libpq_url(settings)
    if conninfo is not None:
        parts = urlsplit(conninfo)
        given = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
        return {
            "conninfo": conninfo,
            **connect_arguments(given, settings, is_one_server="," not in parts.netloc),
        }
    from storage.driver.statements import dialect_of

    url = database_url(settings, data_dir)
    _, of_url = dialect_of(url.drivername).create_connect_args(url)
    return {**of_url, **connect_arguments(url.query, settings, is_one_server=has_one_server(url))}


class PostgresConnection:
    """Implements ``storage.driver.connection.DriverConnection``.

    A cancelled statement leaves the connection closed: psycopg has asked the server to stop it, and the
    request might reach the next one.
    """

    def __init__(
        self, connection: psycopg.AsyncConnection[TupleRow], *, begin: bytes, has_session: bool
    ) -> None:
        """
        Args:
            connection: in psycopg's autocommit mode.
            begin: begins a transaction, in one round trip.
            has_session: whether the server stops statements at the time limit.
        """
        self.rests_since = 0.0
        self.is_running = False
        self._connection = connection
        self._begin = begin
        self._has_session = has_session
        self._is_beginning = False
        #: The request that stops a statement; from then on the connection is not lent again.
        self._stopping: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        is_usable = self._stopping is None
        return is_usable and self._connection.pgconn.transaction_status == TransactionStatus.IDLE

    async def execute(
        self, sql: str, parameters: Parameters | None = None, *, is_short: bool = False
    ) -> DriverRows:
        if self._is_beginning:
            await self._send_begin()
        return await self._complete(self._fetch(sql, parameters))

    async def begin(self) -> None:
        self._is_beginning = True

    async def commit(self) -> None:
        self._is_beginning = False
        await self._complete(self._connection.commit())

    async def rollback(self) -> None:
        self._is_beginning = False
        if not self._connection.closed:
            await self._complete(self._connection.rollback())

    async def answers(self) -> bool:
        cut = self.cut_later(ANSWER_SECONDS)
        try:
            await self.execute("SELECT 1")
        except StorageUnavailableError:
            self.discard()
            return False
        finally:
            cut.cancel()
        return True

    def cut_later(self, seconds: float) -> asyncio.TimerHandle:
        """Shut the socket down after ``seconds``, unless the returned handle is cancelled.

        The server's limits have no effect when the server hangs or the network drops packets, and the driver
        waits for a response without a limit. Shutting the socket down ends its wait. A pooler in transaction
        mode is first asked to cancel the statement. The server may have no limit for it: the statement would
        run on, with the locks that it holds or waits for.
        """
        loop = asyncio.get_running_loop()
        if self._has_session:
            return loop.call_later(seconds, _shut_down, self._connection.pgconn)
        return loop.call_later(seconds, self._stop)

    def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        self._stopping = loop.create_task(self._cancel_statement())
        loop.call_later(_CANCEL_SECONDS, _shut_down, self._connection.pgconn)

    async def _cancel_statement(self) -> None:
        with suppress(psycopg.Error):  # the socket is shut down in any case
            await self._connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def discard(self) -> None:
        self._connection.pgconn.finish()

    async def close(self) -> None:
        self.discard()

    async def _send_begin(self) -> None:
        self._is_beginning = False
        try:
            await self._complete(self._connection.execute(self._begin, prepare=False))
        except StorageUnavailableError as exc:
            raise StorageUnavailableError(str(exc)) from NotBegunError(exc.__cause__)

    async def _fetch(self, sql: str, parameters: Parameters | None) -> DriverRows:
        cursor = await self._connection.execute(sql, parameters)
        result = cursor.pgresult
        return DriverRows(await cursor.fetchall() if result and result.nfields else (), cursor.rowcount)

    async def _complete(self, work: Awaitable[T]) -> T:
        self.is_running = True
        try:
            return await work
        except psycopg.Error as exc:
            raise translated(exc) from exc
        except asyncio.CancelledError:
            self.discard()
            raise
        finally:
            self.is_running = False


def _shut_down(pgconn: Any) -> None:
    try:
        descriptor = os.dup(pgconn.socket)
    except Exception:  # psycopg's error classes: the connection is closed already
        return
    with socket.socket(fileno=descriptor) as duplicate:
        try:
            duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
