"""Blocking engines of SQLAlchemy, and what they share with the connections of event loops.

Migrations need SQLAlchemy's own engines, and so do plugins' synchronous requests for paths. This module
does not import psycopg, so that a process that uses SQLite need not load it, nor SQLAlchemy, which a command
that only reads does not need.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from broker_config.settings import CONNECT_SECONDS, DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.files.private_files import make_directory
from storage.driver.errors import install
from storage.driver.urls import PoolMode, pool_mode

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection

__all__ = [
    "ANSWER_SECONDS",
    "begin_text",
    "blocking_engine",
    "configure",
    "connect_arguments",
    "has_one_server",
    "make_file",
]

#: Time limit of connecting to a single server, and of a ping.
ANSWER_SECONDS: Final = 5
_APPLICATION_NAME: Final = "nekro"
#: SQLite truncates its log file to this size after a checkpoint; otherwise it never shrinks.
_WAL_LIMIT_BYTES: Final = 32 << 20


def blocking_engine(url: URL, settings: DatabaseSettings, *, pooled: bool = False) -> Engine:
    """Build a blocking engine: without a pool for migrations, with one for repeated reading."""
    from sqlalchemy import create_engine, event
    from sqlalchemy.pool import NullPool, QueuePool

    is_sqlite = url.get_backend_name() == "sqlite"
    limits_each_transaction = pooled and not is_sqlite and pool_mode(settings) is PoolMode.TRANSACTION
    if is_sqlite:
        make_file(Path(url.database or ""))
        # The pool lends a connection to one thread at a time.
        arguments: dict[str, Any] = {"check_same_thread": False}
    else:
        arguments = connect_arguments(url.query, settings, is_one_server=has_one_server(url))
        if not pooled:
            # Migrations have no time limit on their statements, because a large table may need long.
            arguments.pop("options", None)
    if limits_each_transaction:
        arguments["autocommit"] = True  # psycopg's BEGIN sets no limits
    engine = create_engine(
        url,
        poolclass=QueuePool if pooled else NullPool,
        pool_pre_ping=pooled and not is_sqlite,
        connect_args=arguments,
    )
    install(engine)

    if is_sqlite:

        @event.listens_for(engine, "connect")
        def prepare(connection: DBAPIConnection, _record: object) -> None:
            assert isinstance(connection, sqlite3.Connection)  # noqa: S101 - the driver of SQLAlchemy's dialect
            configure(connection, settings)

    if limits_each_transaction:

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql(begin_text(settings))

    return engine


def configure(sqlite: sqlite3.Connection, settings: DatabaseSettings) -> None:
    """Set the modes and limits of a new connection to SQLite."""
    # The driver's implicit transactions begin late and deferred; ours begin with an explicit BEGIN.
    sqlite.isolation_level = None
    for pragma in (
        f"busy_timeout = {int(settings.pool_timeout_seconds * 1000)}",  # first: WAL may have to wait
        "journal_mode = WAL",
        f"synchronous = {settings.sqlite_synchronous.upper()}",
        "foreign_keys = ON",
        f"journal_size_limit = {_WAL_LIMIT_BYTES}",
    ):
        sqlite.execute(f"PRAGMA {pragma}").close()


def make_file(path: Path) -> None:
    """Create SQLite's directory and file for its owner only: they contain chats and plugin data."""
    try:
        make_directory(path.parent)
        # SQLite creates its log files with the permissions of this file. An existing file must not be
        # opened here: closing it would drop the POSIX locks of every connection of this process, and
        # another process could then remove the log while it is in use.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError as exc:
        if not path.is_file() or not os.access(path, os.R_OK | os.W_OK):
            raise _cannot_open(path, "it is not a file that this user may write") from exc
    except OSError as exc:
        raise _cannot_open(path, exc.strerror) from exc


def _cannot_open(path: Path, reason: str | None) -> StorageUnavailableError:
    return StorageUnavailableError(
        f"cannot open {path} for SQLite ({reason}); choose another NEKRO_DATA_DIR or NEKRO_DATABASE__URL"
    )


def connect_arguments(
    given: Collection[str], settings: DatabaseSettings, *, is_one_server: bool
) -> dict[str, Any]:
    """Return the arguments of psycopg that the URL's parameters do not contain; ``given`` are their names."""
    arguments: dict[str, Any] = {
        "connect_timeout": ANSWER_SECONDS if is_one_server else int(CONNECT_SECONDS),
        # Of several servers, use the primary; refuse a single server that was demoted.
        "target_session_attrs": "read-write",
        "application_name": _APPLICATION_NAME,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }
    if pool_mode(settings) is PoolMode.TRANSACTION:
        # The server process that prepared a statement is another one than that of its next run.
        arguments["prepare_threshold"] = None
    elif "options" not in given:
        arguments["options"] = " ".join(f"-c {name}={value}" for name, value in _limits(settings).items())
    return {name: value for name, value in arguments.items() if name not in given}


def begin_text(settings: DatabaseSettings) -> str:
    """Return the text that begins a transaction on PostgreSQL; it sets limits that no session has."""
    if pool_mode(settings) is PoolMode.SESSION:
        return "BEGIN"
    # One text of several statements is one round trip.
    statements = [f"SET LOCAL {name} = {value}" for name, value in _limits(settings).items()]
    return "; ".join(["BEGIN", *statements])


def _limits(settings: DatabaseSettings) -> dict[str, int]:
    """Return PostgreSQL's limits, in ms: a worker that hangs inside a transaction must not keep its locks."""
    limit = int(settings.transaction_timeout_seconds * 1000)
    return {"statement_timeout": limit, "idle_in_transaction_session_timeout": limit}


def has_one_server(url: URL) -> bool:
    """Whether a URL names one server, not a primary and its replicas."""
    hosts = url.query.get("host", ())
    return not isinstance(hosts, tuple) and "," not in hosts
