"""SQLite: write-ahead log, explicit transactions, time limits; one writer and some readers per event loop.

SQLite allows one writer at a time, on one machine and a local disk. A process that is suspended (SIGSTOP,
a debugger) inside a write transaction blocks all writers until it resumes or dies; they fail after
``pool_timeout_seconds``. PostgreSQL ends such a transaction itself.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from broker_config.settings import DatabaseSettings
from nekro.base.tasks import complete
from storage.driver.blocking import configure, make_file
from storage.driver.connection import DriverRows
from storage.driver.errors import translated
from storage.driver.fifo_semaphore import FifoSemaphore
from storage.driver.pool import Pool, connection_semaphore
from storage.driver.sqlite_connection import SqliteConnection
from storage.driver.values import Parameters

__all__ = ["SqlitePool"]

#: More readers would only wait for Python's interpreter lock.
_MOST_READERS: Final = 4


class SqlitePool(Pool[SqliteConnection]):
    """The connections of an event loop: a pool of readers, and one writer behind a semaphore."""

    def __init__(self, path: Path, settings: DatabaseSettings) -> None:
        super().__init__(
            self._connect_to_file, connection_semaphore(min(_MOST_READERS, settings.pool_size), settings)
        )
        self._path = path
        self._settings = settings
        seconds = settings.pool_timeout_seconds
        error = (
            f"other writers of this process kept SQLite busy for {seconds} s; "
            "raise NEKRO_DATABASE__POOL_TIMEOUT_SECONDS or use PostgreSQL"
        )
        self._writers = Pool(self._connect_to_file, FifoSemaphore(1, seconds=seconds, error=error))

    def writer(self) -> AbstractAsyncContextManager[SqliteConnection]:
        """Lend the writer, to one transaction at a time in order."""
        return self._writers.writer()

    async def run(self, sql: str, parameters: Parameters, *, writes: bool) -> DriverRows:
        """Run a single statement; concurrent writes share the writer, whose thread runs them in order."""
        if not writes:
            reader = self.idle  # not lent, because nothing else can use it before this has ended
            found = None if reader is None else reader.run_here(sql, parameters)
            return await super().run(sql, parameters, writes=False) if found is None else found
        await self._writers.semaphore.acquire(shared=True)
        try:
            if (writer := self._writers.idle) is not None:
                return await writer.execute(sql, parameters)
        finally:
            self._writers.semaphore.release()
        return await self._writers.run(sql, parameters, writes=True)  # it has to be opened

    async def close(self) -> None:
        await asyncio.gather(super().close(), self._writers.close())

    def abandon(self) -> None:
        super().abandon()
        self._writers.abandon()

    async def _connect_to_file(self) -> SqliteConnection:
        opening = asyncio.create_task(asyncio.to_thread(self._open_file))
        try:
            sqlite = await complete(opening)
        except asyncio.CancelledError:
            if not opening.cancelled() and opening.exception() is None:
                opening.result().close()
            raise
        except sqlite3.Error as exc:
            raise translated(exc) from exc
        settings = self._settings
        seconds = min(settings.pool_timeout_seconds, settings.transaction_timeout_seconds)
        return SqliteConnection(sqlite, busy_seconds=seconds)

    def _open_file(self) -> sqlite3.Connection:
        make_file(self._path)
        # The loop and the connection's thread use it alternately, never concurrently.
        sqlite = sqlite3.connect(self._path, check_same_thread=False)
        try:
            configure(sqlite, self._settings)
            sqlite.execute("PRAGMA busy_timeout = 0")  # the connection waits for locks itself
        except BaseException:
            sqlite.close()
            raise
        return sqlite
