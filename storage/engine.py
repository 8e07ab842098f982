"""The database of a process: engines, transactions, time limits.

``Database.begin()`` is the one way to write and ``Database.read()`` the one way to read; both
give a :class:`~storage.transaction.Transaction` with the repositories.

What "committed" means. On PostgreSQL a commit is on disk. On SQLite the write-ahead log runs with
``synchronous=NORMAL``: a commit survives the death of any process, SIGKILL included, but the last
commits may be missing (never torn, never out of order) after a power loss or a kernel crash.
``NEKRO_DATABASE__SQLITE_SYNCHRONOUS=full`` closes that too, for one fsync per commit.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import exc as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import NekroError, StorageUnavailableError
from storage import postgresql, sqlite
from storage.connection import LoopConnection
from storage.driver_errors import translated
from storage.transaction import Transaction
from storage.urls import async_url

__all__ = ["Database"]

#: How much later than its connection a transaction's own task is stopped (see ``_limited``).
_GRACE_SECONDS: Final = 1.0
#: How long ``dispose`` waits for the engine of another thread's loop.
_DISPOSE_SECONDS: Final = 10.0


class _LoopEngine:
    """The engine of one event loop: connections of asyncio drivers belong to the loop that opened them."""

    def __init__(self, settings: DatabaseSettings, data_dir: Path) -> None:
        url = async_url(settings, data_dir)
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self.engine: AsyncEngine = (
            sqlite.create(url, settings) if self.is_sqlite else postgresql.create(url, settings)
        )
        # SQLite's driver is in autocommit anyway (see storage.sqlite); setting it costs thread hops.
        self.autocommit: AsyncEngine = (
            self.engine if self.is_sqlite else self.engine.execution_options(isolation_level="AUTOCOMMIT")
        )
        # SQLite has one writer. Waiting for it in its busy handler means polling with growing
        # pauses and no order, so writers of one loop queue here and only processes compete there.
        self.write_gate = asyncio.Lock() if self.is_sqlite else None
        self.writers: set[asyncio.Task[object] | None] = set()


class Database:
    """One database, usable from any number of event loops and threads of the process.

    Nothing is opened before the first use; each loop gets an engine of its own. Call
    ``dispose_loop`` before a loop ends and ``dispose`` before the process ends.
    """

    def __init__(self, settings: DatabaseSettings, data_dir: Path) -> None:
        """Check the URL; nothing is opened.

        Args:
            data_dir: where the SQLite file lies when ``settings.url`` is None.

        Raises:
            SettingsError: the URL is not one of PostgreSQL or of a SQLite file.
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
        """Whether rows live in a SQLite file (else: PostgreSQL)."""
        return self.url.get_backend_name() == "sqlite"

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Transaction]:
        """Open a write transaction; commit when the block ends, roll back when it raises.

        Callbacks given to ``Transaction.after_commit`` run after the commit. Keep the block short
        and free of anything but SQL: on SQLite it holds the only write lock there is.

        Raises:
            StorageUnavailableError: no connection or no write lock within the limits of the
                settings, or the transaction took longer than ``transaction_timeout_seconds``.
            ConflictError: a row breaks a constraint.
            RuntimeError: the task is inside ``begin()`` already; it would wait for itself.
        """
        local = self._local()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writing(local))
            connection = await stack.enter_async_context(self._connected(local.engine))
            if local.is_sqlite:
                await connection.exec_driver_sql("BEGIN IMMEDIATE")
            transaction = Transaction(connection)
            try:
                async with self._limited():
                    yield transaction
                await connection.commit()
            except BaseException:
                await asyncio.shield(_roll_back(connection, is_sqlite=local.is_sqlite))
                raise
        await transaction.run_callbacks()

    @asynccontextmanager
    async def autocommit(self) -> AsyncIterator[Transaction]:
        """Open a connection on which each statement is a transaction of its own.

        For writes of one statement: it spares the round trips of BEGIN and COMMIT.
        """
        local = self._local()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._writing(local))
            connection = await stack.enter_async_context(self._connected(local.autocommit))
            async with self._limited():
                yield Transaction(connection)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        """Open a connection for reading; never waits for writers.

        Each statement sees what was committed when it began.
        """
        async with self._connected(self._local().autocommit) as connection, self._limited():
            yield Transaction(connection)

    async def dispose_loop(self) -> None:
        """Close the connections of the running loop; the next use opens new ones."""
        with self._lock:
            local = self._engines.pop(asyncio.get_running_loop(), None)
        if local is not None:
            await local.engine.dispose()

    async def dispose(self) -> None:
        """Close the connections of every loop of the process.

        Loops of other threads close their own while they run; what belongs to a loop that has
        ended without ``dispose_loop`` is dropped.
        """
        await self.dispose_loop()
        with self._lock:
            others = list(self._engines.items())
            self._engines.clear()
        for loop, local in others:
            if loop.is_running():
                future = asyncio.run_coroutine_threadsafe(local.engine.dispose(), loop)
                await asyncio.wait_for(asyncio.wrap_future(future), _DISPOSE_SECONDS)
            else:
                local.engine.sync_engine.dispose(close=False)

    def _local(self) -> _LoopEngine:
        loop = asyncio.get_running_loop()
        with self._lock:
            local = self._engines.get(loop)
            if local is None:
                local = self._engines[loop] = _LoopEngine(self.settings, self._data_dir)
            return local

    @asynccontextmanager
    async def _writing(self, local: _LoopEngine) -> AsyncIterator[None]:
        task = asyncio.current_task()
        if task in local.writers:
            raise RuntimeError("this task is inside a write transaction already; pass that one along")
        async with AsyncExitStack() as stack:
            if local.write_gate is not None:
                await _acquire(local.write_gate, self.settings.busy_timeout_seconds)
                stack.callback(local.write_gate.release)
            local.writers.add(task)
            stack.callback(local.writers.discard, task)
            yield

    @asynccontextmanager
    async def _connected(self, engine: AsyncEngine) -> AsyncIterator[LoopConnection]:
        connection = LoopConnection(engine)
        try:
            await connection.start()
        except sa.TimeoutError as exc:
            raise StorageUnavailableError(
                f"no database connection was free within {self.settings.pool_timeout_seconds} s; "
                "raise NEKRO_DATABASE__POOL_SIZE or lower the worker's concurrency"
            ) from exc
        except sa.SQLAlchemyError as exc:
            raise translated(exc) from exc
        cut = None
        if not self.is_sqlite:
            cut = postgresql.cut_after(connection, self.settings.transaction_timeout_seconds)
        try:
            yield connection
        finally:
            if cut is not None:
                cut.cancel()
            # Shielded: a cancelled caller must not leave a connection out of the pool.
            await asyncio.shield(connection.close())

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Stop a block that outlives the cut of its connection, because it waits for something else."""
        seconds = self.settings.transaction_timeout_seconds
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS) as limit:
                yield
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise StorageUnavailableError(
                f"a transaction took longer than {seconds} s (NEKRO_DATABASE__TRANSACTION_TIMEOUT_SECONDS)"
            ) from exc


async def _roll_back(connection: LoopConnection, *, is_sqlite: bool) -> None:
    if connection.invalidated or connection.closed:
        return
    try:
        # SQLAlchemy skips the rollback of a driver in autocommit, which SQLite's always is.
        await (connection.exec_driver_sql("ROLLBACK") if is_sqlite else connection.rollback())
    except NekroError:
        # The error that led here is the one to report; a connection in doubt is not used again.
        await connection.invalidate()


async def _acquire(gate: asyncio.Lock, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await gate.acquire()
    except TimeoutError as exc:
        raise StorageUnavailableError(
            f"other writers of this process kept SQLite busy for {seconds} s; "
            "raise NEKRO_DATABASE__BUSY_TIMEOUT_SECONDS or use PostgreSQL"
        ) from exc
