"""Engines for SQLite: write-ahead log, explicit transactions, time limits.

SQLite allows one writer at a time, on one machine and a local disk. A process that is suspended (SIGSTOP,
a debugger) inside a write transaction blocks all writers until it resumes or dies; they fail after
``pool_timeout_seconds``. PostgreSQL ends such a transaction itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool, QueuePool

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from nekro_agent.files.private_files import make_directory
from storage.driver import sqlite_driver
from storage.driver.error_hook import install

__all__ = ["create", "create_sync"]

#: More connections would only wait for the single writer and for Python's interpreter lock.
_MOST_CONNECTIONS: Final = 4
#: Size to which the log file is truncated after a checkpoint; otherwise it never shrinks.
_WAL_LIMIT_BYTES: Final = 32 << 20


def create(url: URL, settings: DatabaseSettings) -> AsyncEngine:
    """Build the engine of one event loop; the file is created if there is none."""
    _make_file(url)
    engine = create_async_engine(
        url,
        pool_size=min(_MOST_CONNECTIONS, settings.pool_size),
        max_overflow=0,
        pool_timeout=settings.pool_timeout_seconds,
        connect_args={"async_creator_fn": sqlite_driver.connect},
        # A rollback after `begin()` has ended would be an unnecessary call to the connection's thread.
        skip_autocommit_rollback=True,
    )
    _prepare(engine.sync_engine, settings)
    return engine


def create_sync(url: URL, settings: DatabaseSettings, *, pooled: bool = False) -> Engine:
    """Build a blocking engine: without a pool for migrations, with one for repeated reading."""
    _make_file(url)
    engine = create_engine(
        url,
        poolclass=QueuePool if pooled else NullPool,
        connect_args={"check_same_thread": False},  # opened on a thread, used on the loop
    )
    _prepare(engine, settings)
    return engine


def _prepare(engine: Engine, settings: DatabaseSettings) -> None:
    install(engine)

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: Any) -> None:
        # The driver's implicit transactions begin late and deferred; ours begin with an explicit BEGIN.
        connection.isolation_level = None
        cursor = connection.cursor()
        try:
            for pragma in (
                f"busy_timeout = {int(settings.pool_timeout_seconds * 1000)}",  # first: WAL may have to wait
                "journal_mode = WAL",
                f"synchronous = {settings.sqlite_synchronous.upper()}",
                "foreign_keys = ON",
                f"journal_size_limit = {_WAL_LIMIT_BYTES}",
            ):
                cursor.execute(f"PRAGMA {pragma}")
        finally:
            cursor.close()


def _make_file(url: URL) -> None:
    """Create directory and file, readable by the owner only, because they contain chats and plugin data."""
    path = Path(url.database or "")
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
