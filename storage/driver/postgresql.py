"""PostgreSQL: psycopg, with time limits and detection of stale connections before use."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.driver.blocking import ANSWER_SECONDS, connect_arguments, has_one_server
from storage.driver.connection import DriverRows
from storage.driver.errors import translated
from storage.driver.pool import Pool, connection_gate
from storage.driver.urls import database_url, libpq_url
from storage.driver.values import Parameters

__all__ = ["PostgresConnection", "postgres_pool"]

T = TypeVar("T")


def postgres_pool(settings: DatabaseSettings, data_dir: Path) -> Pool[PostgresConnection]:
    """Return the pool of an event loop; nothing is opened."""
    arguments = _arguments(settings, data_dir)

    async def connect() -> PostgresConnection:
        try:
            return PostgresConnection(await psycopg.AsyncConnection.connect(autocommit=True, **arguments))
        except psycopg.Error as exc:
            raise translated(exc) from exc

    return Pool(
        connect,
        connection_gate(settings.pool_size, settings),
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

    def __init__(self, connection: psycopg.AsyncConnection[TupleRow]) -> None:
        self.rests_since = 0.0
        self.is_running = False
        self._connection = connection

    @property
    def is_idle(self) -> bool:
        return self._connection.pgconn.transaction_status == TransactionStatus.IDLE

    async def execute(
        self, sql: str, parameters: Parameters | None = None, *, is_short: bool = False
    ) -> DriverRows:
        return await self._complete(self._fetch(sql, parameters))

    async def begin(self) -> None:
        await self._complete(self._connection.set_autocommit(False))

    async def commit(self) -> None:
        await self._complete(self._connection.commit())
        await self._complete(self._connection.set_autocommit(True))

    async def rollback(self) -> None:
        if not self._connection.closed:
            await self._complete(self._connection.rollback())
            await self._complete(self._connection.set_autocommit(True))

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
        waits for a response without a limit. Shutting the socket down ends its wait.
        """
        return asyncio.get_running_loop().call_later(seconds, _shut_down, self._connection.pgconn)

    def discard(self) -> None:
        self._connection.pgconn.finish()

    async def close(self) -> None:
        self.discard()

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
