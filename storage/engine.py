"""The database of a process: transactions, single statements, time limits.

``Database.begin()`` opens a transaction for writing, ``Database.autocommit()`` a connection for writes
of one statement and ``Database.read()`` one for reading; all yield a
:class:`~storage.transaction.Transaction` with the repositories. ``Database.run()`` is a faster path for
frequent single statements.

Durability: on PostgreSQL a commit is on disk. On SQLite the write-ahead log runs with
``synchronous=NORMAL``: a commit survives the death of any process, SIGKILL included, but the last
commits may be missing (never torn, never out of order) after a power loss or a kernel crash.
``NEKRO_DATABASE__SQLITE_SYNCHRONOUS=full`` prevents that at the cost of one fsync per commit.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from loguru import logger

from broker_config.settings import DatabaseSettings
from nekro.base.tasks import complete
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.shared_clock import Reading, read_clock, share_time
from storage.caller_reads import NOW, time_of
from storage.driver.connection import Connection, DriverConnection
from storage.driver.pool import Pool, limited
from storage.driver.sqlite import SqlitePool
from storage.driver.urls import PoolMode, database_url, libpq_url, pool_mode, sqlite_path
from storage.transaction import Transaction

if TYPE_CHECKING:
    from sqlalchemy import URL, Dialect

    from storage.driver.statements import SingleStatement

__all__ = ["Database", "follow_database_clock", "read_database_clock"]


class Database:
    """One database, usable from any number of event loops and threads of the process.

    Nothing is opened before the first use; each loop gets connections of its own. Call
    ``dispose_loop`` before a loop ends and ``dispose`` before the process ends.
    """

    def __init__(self, settings: DatabaseSettings, data_dir: Path) -> None:
        """Check the URL; nothing is opened.

        Args:
            data_dir: directory of the SQLite file when ``settings.url`` is None.

        Raises:
            SettingsError: the URL does not name PostgreSQL or a SQLite file, or its pool mode is unknown.
        """
        self.settings = settings
        self._data_dir = data_dir
        self._file = sqlite_path(settings, data_dir)
        if self._file is None and libpq_url(settings) is None and self.url.get_backend_name() == "sqlite":
            self._file = Path(self.url.database or "")
        self._lock = threading.Lock()
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Pool[Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: Tasks inside a write transaction.
        self._writing: set[asyncio.Task[object] | None] = set()

    @cached_property
    def url(self) -> URL:
        """The URL as SQLAlchemy has it."""
        return database_url(self.settings, self._data_dir)

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file (otherwise PostgreSQL)."""
        return self._file is not None

    @property
    def pool_mode(self) -> PoolMode:
        """How long a connection keeps its server process; ``session`` for SQLite."""
        return PoolMode.SESSION if self.is_sqlite else pool_mode(self.settings)

    @cached_property
    def _dialect(self) -> Dialect:
        from storage.driver.statements import dialect_of

        return dialect_of(self._backend)

    @property
    def _backend(self) -> str:
        return "sqlite" if self.is_sqlite else "postgresql+psycopg"

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Transaction]:
        """Open a write transaction; commit when the block ends, roll back when it raises.

        Callbacks given to ``Transaction.after_commit`` run after the commit. Keep the block short and do
        nothing but SQL in it: on SQLite it holds the only write lock from its first statement on.

        Raises:
            StorageUnavailableError: no connection or no write lock within the limits of the
                settings, or the transaction took longer than ``transaction_timeout_seconds``.
            ConflictError: a row violates a constraint.
            RuntimeError: the task is already inside ``begin()`` and would deadlock.
        """
        async with self._writer() as connection:
            await connection.begin()
            transaction = self._transaction(connection)
            try:
                async with limited(self.settings.transaction_timeout_seconds):
                    yield transaction
                    await transaction.flush()
                await connection.commit()
            except BaseException:
                # The original error is the one to report; a connection in an unknown state is not used again.
                with suppress(StorageError):
                    await complete(connection.rollback())
                raise
        await transaction.run_callbacks()

    def _transaction(self, connection: DriverConnection) -> Transaction:
        return Transaction(Connection(connection, self._backend), key_bytes=self.settings.key_bytes)

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[Transaction]:
        """Open a connection that commits each statement separately.

        For writes of one statement: it saves the round trips of BEGIN and COMMIT.
        """
        async with self._writer() as connection, limited(self.settings.transaction_timeout_seconds):
            yield self._transaction(connection)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        """Open a connection for reading; never waits for writers.

        Each statement sees the data that was committed when it began.
        """
        reader = self._pool().reader()
        async with reader as connection, limited(self.settings.transaction_timeout_seconds):
            yield self._transaction(connection)

    async def run(self, statement: SingleStatement, values: Mapping[str, Any]) -> Any:
        """Run one statement as a transaction of its own.

        Returns:
            The first column of the first row; None when there is no row.

        Raises:
            StorageUnavailableError, ConflictError, RuntimeError: as from ``begin``.
            InvalidValueError: a column type refuses a value.
        """
        if statement.writes:
            self._refuse_second_writer()
        compiled = statement.compiled(self._dialect)
        parameters = compiled.parameters(values)
        rows, _ = await self._pool().run(compiled.sql, parameters, writes=statement.writes)
        return compiled.rows(rows[:1])[0][0] if rows else None

    async def __aenter__(self) -> Self:
        """Return the database."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.dispose()

    async def dispose_loop(self) -> None:
        """Close the connections of the running loop; the next use opens new ones."""
        with self._lock:
            pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await complete(pool.close())

    async def dispose(self) -> None:
        """Close the connections of every loop of the process.

        Running loops of other threads close their own connections; those of a loop that has ended without
        ``dispose_loop`` are dropped. A connection in use is closed when it is returned.
        """
        await self.dispose_loop()
        with self._lock:
            others = list(self._pools.items())
            self._pools.clear()
        for loop, pool in others:
            if loop.is_running():
                await _close_there(pool, loop)
            else:
                pool.abandon()

    def _pool(self) -> Pool[Any]:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._new_pool()
            with self._lock:
                self._pools[loop] = pool
            weakref.finalize(loop, pool.abandon).atexit = False
        return pool

    def _new_pool(self) -> Pool[Any]:
        if self._file is not None:
            return SqlitePool(self._file, self.settings)
        # A process that uses SQLite need not load psycopg.
        from storage.driver.postgresql import postgres_pool

        return postgres_pool(self.settings, self._data_dir)

    @asynccontextmanager
    async def _writer(self) -> AsyncIterator[DriverConnection]:
        self._refuse_second_writer()
        task = asyncio.current_task()
        async with self._pool().writer() as connection:
            self._writing.add(task)
            try:
                yield connection
            finally:
                self._writing.discard(task)

    def _refuse_second_writer(self) -> None:
        if self._writing and asyncio.current_task() in self._writing:
            raise RuntimeError("this task is already inside a write transaction; use that transaction")


async def _close_there(pool: Pool[Any], loop: asyncio.AbstractEventLoop) -> None:
    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pool.close(), loop))
    if not (await asyncio.wait({future}, timeout=2 * CLOSE_STEP_SECONDS))[0]:
        logger.warning("connections_of_blocked_loop_abandoned")
        future.cancel()
        return
    future.result()


async def follow_database_clock(database: Database) -> Reading | None:
    """Read the database's clock and make it the shared time of this process.

    Returns:
        None on SQLite: the database uses the clock of this host, and nothing was read.

    Raises:
        StorageUnavailableError: the database does not answer; the shared time is not changed.
    """
    if database.is_sqlite:
        return None
    reading = await read_database_clock(database)
    share_time(reading)
    return reading


async def read_database_clock(database: Database, *, host_clock: Callable[[], float] = time.time) -> Reading:
    """Compare this host's clock with the database's.

    Raises:
        StorageUnavailableError: the database does not answer.
    """
    # Taken before the exchange is timed.
    async with database.read() as transaction:
        connection = transaction.connection

        async def ask() -> float:
            answer = await connection.exec_driver_sql(f"SELECT {NOW[connection.is_sqlite]}")
            return time_of(answer.scalar_one()).timestamp()

        return await read_clock(ask, host_clock=host_clock)
