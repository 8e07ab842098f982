"""Engines for PostgreSQL: psycopg, with time limits and detection of stale connections before use."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any, Final

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, QueuePool

from broker_config.settings import CONNECT_SECONDS, DatabaseSettings
from nekro_agent.durations import FRESH_SECONDS
from storage.driver.error_hook import install

__all__ = ["create", "create_sync", "cut_later", "has_rested_long"]

#: Time limit of connecting to a single server, and of a ping.
ANSWER_SECONDS: Final = 5
_APPLICATION_NAME: Final = "nekro"


def create(url: URL, settings: DatabaseSettings) -> AsyncEngine:
    """Build the engine of one event loop; connections open at first use."""
    engine = create_async_engine(
        url,
        pool_size=settings.pool_size,
        max_overflow=0,
        pool_timeout=settings.pool_timeout_seconds,
        connect_args=_connect_arguments(url, settings),
        skip_autocommit_rollback=True,
    )
    install(engine.sync_engine)
    _ping_after_rest(engine.sync_engine)
    return engine


def create_sync(url: URL, settings: DatabaseSettings, *, pooled: bool = False) -> Engine:
    """Build a blocking engine: without a pool for migrations, with one for repeated reading.

    Migrations have no time limit on their statements, because a large table may need long.
    """
    arguments = _connect_arguments(url, settings)
    if not pooled:
        arguments.pop("options", None)
    engine = create_engine(
        url,
        poolclass=QueuePool if pooled else NullPool,
        pool_pre_ping=pooled,
        connect_args=arguments,
    )
    install(engine)
    return engine


def cut_later(driver_connection: Any, seconds: float) -> asyncio.TimerHandle:
    """Shut the connection's socket down after ``seconds``, unless the returned handle is cancelled.

    The server's limits have no effect when the server hangs or the network drops packets, and the driver
    waits for a response without a limit. Shutting the socket down ends its wait.
    """
    return asyncio.get_running_loop().call_later(seconds, _shut_down, driver_connection.pgconn)


def has_rested_long(rests_since: float) -> bool:
    """Whether a connection must be pinged before it is used.

    Args:
        rests_since: ``time.monotonic`` at the end of its last use.
    """
    return time.monotonic() - rests_since >= FRESH_SECONDS


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


def _connect_arguments(url: URL, settings: DatabaseSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "connect_timeout": ANSWER_SECONDS if _has_one_server(url) else int(CONNECT_SECONDS),
        # Of several servers, use the primary; refuse a single server that was demoted.
        "target_session_attrs": "read-write",
        "application_name": _APPLICATION_NAME,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    if "options" not in url.query:
        # A worker that hangs inside a transaction must not hold its row locks forever.
        limit = int(settings.transaction_timeout_seconds * 1000)
        arguments["options"] = f"-c statement_timeout={limit} -c idle_in_transaction_session_timeout={limit}"
    return {name: value for name, value in arguments.items() if name not in url.query}


def _has_one_server(url: URL) -> bool:
    hosts = url.query.get("host", ())
    return not isinstance(hosts, tuple) and "," not in hosts


def _ping_after_rest(engine: Engine) -> None:
    """Detect connections that broke while idle (a restarted server, a dropped NAT entry).

    Cheaper than SQLAlchemy's ``pool_pre_ping``, which pings before every use: a busy connection
    is not pinged at all.
    """

    @event.listens_for(engine, "checkin")
    def remember(_connection: DBAPIConnection | None, entry: ConnectionPoolEntry) -> None:
        entry.info["rests_since"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def ping(connection: DBAPIConnection, entry: ConnectionPoolEntry, _proxy: Any) -> None:
        rests_since = entry.info.get("rests_since")
        if rests_since is None or not has_rested_long(rests_since):
            return
        cut = cut_later(entry.driver_connection, ANSWER_SECONDS)
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as exc:
            # The pool drops every connection of that age and opens a new one.
            raise DisconnectionError() from exc
        finally:
            cut.cancel()
