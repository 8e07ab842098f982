"""The database of a process: engines, transactions, time limits.

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
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncEngine

from broker_config.settings import DatabaseSettings
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import NekroError
from runtime.completion import complete
from storage.driver import postgresql, sqlite
from storage.driver.connection import LoopConnection
from storage.driver.errors import translated_from_driver
from storage.driver.fixed_statement import SingleStatement
from storage.driver.kept_connections import KeptConnections
from storage.driver.limits import limited
from storage.driver.loop_pool import LoopPool
from storage.driver.sqlite_driver import StepConnection
from storage.driver.sqlite_lanes import SqliteLanes
from storage.driver.urls import async_url
from storage.driver.write_gate import WriteGate
from storage.transaction import Transaction

__all__ = ["Database"]


logger = logging.getLogger(__name__)


class SingleRunner(Protocol):
    """Runs single statements in autocommit mode directly on a driver's connections."""

    async def fetch_one(self, sql: str, parameters: Any, *, writes: bool) -> tuple[Any, ...] | None:
        """Run a statement; returns its first row. The driver's errors are not translated."""
        ...

    async def close(self) -> None:
        """Close the runner's own connections."""
        ...


class _LoopEngine:
    """Engine, pool and single-statement runner of one event loop."""

    def __init__(self, settings: DatabaseSettings, data_dir: Path) -> None:
        url = async_url(settings, data_dir)
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.engine: AsyncEngine = (
            sqlite.create(url, settings) if self.is_sqlite else postgresql.create(url, settings)
        )
        self.write_gate = WriteGate(settings) if self.is_sqlite else None
        self.writers: set[asyncio.Task[object] | None] = set()
        self.driver_error = self.engine.dialect.loaded_dbapi.Error
        self.pool = LoopPool(self.engine)
        self.singles: SingleRunner = (
            KeptConnections(self.pool, settings)
            if self.write_gate is None
            else SqliteLanes(url, settings, self.write_gate)
        )

    def refuse_second_writer(self) -> None:
        """Raise RuntimeError when the current task is already in a write transaction (a deadlock)."""
        if self.writers and asyncio.current_task() in self.writers:
            raise RuntimeError("this task is already inside a write transaction; use that transaction")

    async def dispose(self) -> None:
        """Close the connections; call it on the loop. A cancellation waits until that is done."""
        await complete(self._dispose())

    async def _dispose(self) -> None:
        await self.singles.close()
        await self.pool.dispose()


class Database:
    """One database, usable from any number of event loops and threads of the process.

    Nothing is opened before the first use; each loop gets an engine of its own. Call
    ``dispose_loop`` before a loop ends and ``dispose`` before the process ends.
    """

    def __init__(self, settings: DatabaseSettings, data_dir: Path) -> None:
        """Check the URL; nothing is opened.

        Args:
            data_dir: directory of the SQLite file when ``settings.url`` is None.

        Raises:
            SettingsError: the URL does not name PostgreSQL or a SQLite file.
        """
        self.url = async_url(settings, data_dir)
        self.settings = settings
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopEngine] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file (otherwise PostgreSQL)."""
        return self.url.get_backend_name() == "sqlite"

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
        local = self._local()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writing(local))
            connection = await stack.enter_async_context(self._connected(local))
            if local.is_sqlite:
                stack.enter_context(_begun_with_next(connection.driver_connection))
            # Statements that bypass SQLAlchemy would not make it begin or commit a transaction.
            connection.sync_connection.begin()
            transaction = Transaction(connection)
            try:
                async with limited(self.settings.transaction_timeout_seconds):
                    yield transaction
                await connection.commit()
            except BaseException:
                await complete(_roll_back(connection, is_sqlite=local.is_sqlite), among=local.pool.endings)
                raise
        await transaction.run_callbacks()

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[Transaction]:
        """Open a connection on which each statement is committed separately.

        For writes of one statement: it saves the round trips of BEGIN and COMMIT.
        """
        local = self._local()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writing(local))
            connection = await stack.enter_async_context(self._connected(local, autocommit=True))
            async with limited(self.settings.transaction_timeout_seconds):
                yield Transaction(connection)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        """Open a connection for reading; never waits for writers.

        Each statement sees the data that was committed when it began.
        """
        local = self._local()
        limit = limited(self.settings.transaction_timeout_seconds)
        async with self._connected(local, autocommit=True) as connection, limit:
            yield Transaction(connection)

    async def run(self, statement: SingleStatement, values: Mapping[str, Any]) -> Any:
        """Run one statement as a transaction of its own, directly on the driver.

        Returns:
            The first column of the first row; None when there is no row.

        Raises:
            StorageUnavailableError, ConflictError, RuntimeError: as from ``begin``.
            InvalidValueError: a column type refuses a value.
        """
        local = self._local()
        if statement.writes:
            local.refuse_second_writer()
        on_driver = statement.compiled(local.engine.dialect)
        parameters = on_driver.parameters(values)
        try:
            row = await local.singles.fetch_one(on_driver.sql, parameters, writes=statement.writes)
        except local.driver_error as exc:
            raise translated_from_driver(exc, local.engine.dialect) from exc
        return None if row is None else on_driver.rows([row])[0][0]

    async def dispose_loop(self) -> None:
        """Close the connections of the running loop; the next use opens new ones."""
        with self._lock:
            local = self._engines.pop(asyncio.get_running_loop(), None)
        if local is not None:
            await local.dispose()

    async def dispose(self) -> None:
        """Close the connections of every loop of the process.

        Running loops of other threads close their own connections; those of a loop that has ended without
        ``dispose_loop`` are dropped. A connection in use is closed when it is returned.
        """
        await self.dispose_loop()
        with self._lock:
            others = list(self._engines.items())
            self._engines.clear()
        for loop, local in others:
            if loop.is_running():
                await _dispose_there(local, loop)
            else:
                local.pool.abandon()

    def _local(self) -> _LoopEngine:
        loop = asyncio.get_running_loop()
        local = self._engines.get(loop)
        if local is None:
            local = _LoopEngine(self.settings, self._data_dir)
            with self._lock:
                self._engines[loop] = local
            weakref.finalize(loop, local.pool.abandon).atexit = False
        return local

    @asynccontextmanager
    async def _writing(self, local: _LoopEngine) -> AsyncIterator[None]:
        local.refuse_second_writer()
        task = asyncio.current_task()
        async with local.write_gate.alone() if local.write_gate is not None else nullcontext():
            local.writers.add(task)
            try:
                yield
            finally:
                local.writers.discard(task)

    @asynccontextmanager
    async def _connected(
        self, local: _LoopEngine, *, autocommit: bool = False
    ) -> AsyncIterator[LoopConnection]:
        # SQLite's driver is in autocommit anyway (see storage.driver.sqlite); setting it costs thread hops.
        connection = await local.pool.connect(autocommit=autocommit and not local.is_sqlite)
        cut = None
        if not self.is_sqlite:
            seconds = self.settings.transaction_timeout_seconds
            cut = postgresql.cut_later(connection.driver_connection, seconds)
        try:
            yield connection
        finally:
            if cut is not None:
                cut.cancel()
            await connection.close()


async def _dispose_there(local: _LoopEngine, loop: asyncio.AbstractEventLoop) -> None:
    future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(local.dispose(), loop))
    if not (await asyncio.wait({future}, timeout=2 * CLOSE_STEP_SECONDS))[0]:
        logger.warning("the database connections of a blocked event loop were not closed; abandoned")
        future.cancel()
        return
    future.result()


@contextmanager
def _begun_with_next(driver: StepConnection) -> Iterator[None]:
    """Send BEGIN together with the block's first statement, which saves a call to the driver's thread."""
    driver.precede = "BEGIN IMMEDIATE"
    try:
        yield
    finally:
        driver.precede = None


async def _roll_back(connection: LoopConnection, *, is_sqlite: bool) -> None:
    if connection.invalidated or connection.closed:
        return
    if is_sqlite and not connection.driver_connection.in_transaction:
        return  # BEGIN failed, or no statement was run
    try:
        # SQLAlchemy skips the rollback of a driver in autocommit mode, and SQLite's driver always is.
        await (connection.exec_driver_sql("ROLLBACK") if is_sqlite else connection.rollback())
    except NekroError:
        # The original error is the one to report; a connection in an unknown state is not used again.
        await connection.invalidate()
