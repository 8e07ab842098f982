"""SQLite: write-ahead log, explicit transactions, time limits; one writer and some readers per event loop.

SQLite allows one writer at a time, on one machine and a local disk. A process that is suspended (SIGSTOP,
a debugger) inside a write transaction blocks all writers until it resumes or dies; they fail after
``pool_timeout_seconds``. PostgreSQL ends such a transaction itself.

A call to a thread takes several times as long as a statement that finds a row by its key, so such
statements run on the calling thread, and so does the commit of a transaction that had no other ones. The loop
waits neither for a lock nor for the disk: a statement that another connection's lock refuses is tried again
on the thread. With ``synchronous = normal`` a commit only appends to the log, in the memory of the kernel;
what waits for the disk is the checkpoint, which every 16th commit makes on the thread if the log is long.
With ``full`` every commit runs there."""

from __future__ import annotations

import asyncio
import sqlite3
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Final

from loguru import logger

from broker_config.settings import DatabaseSettings
from nekro.base.tasks import complete, outlast
from nekro_agent.durations import CLOSE_STEP_SECONDS
from storage.driver.blocking import configure, make_file
from storage.driver.connection import DriverRows
from storage.driver.errors import is_busy, translated
from storage.driver.pool import FifoSemaphore, Pool, connection_semaphore
from storage.driver.values import Parameters

__all__ = [
    "SqliteConnection",
    "SqlitePool",
]


#: Pauses between the attempts of a statement that waits for a lock, as SQLite makes them; the last repeats.
_PAUSES: Final = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025)
#: Commits on the loop before one on the thread, which may make a checkpoint.
_COMMITS_HERE: Final = 15
#: Pages of the log that make a commit a checkpoint; SQLite's own default.
_CHECKPOINT_PAGES: Final = 1000


class SqliteConnection:
    """Implements ``storage.driver.connection.DriverConnection``.

    Its statements run one after another. Several callers may wait for statements that change or read
    committed data, since those leave no state on the connection.
    """

    def __init__(
        self, sqlite: sqlite3.Connection, *, busy_seconds: float, commits_here: bool = False
    ) -> None:
        """
        Args:
            sqlite: without implicit transactions, usable by all threads, with a busy timeout of 0.
            busy_seconds: how long a statement waits for the locks of other connections.
            commits_here: whether a commit without a checkpoint does not wait for the disk, so that
                transactions of short statements are committed on the calling thread.
        """
        self.rests_since = 0.0
        self._sqlite = sqlite
        self._busy_seconds = busy_seconds
        self._most_here = _COMMITS_HERE if commits_here else 0
        #: How many commits may still run here, and whether the running transaction may.
        self._left_here, self._is_short = self._most_here, True
        self._makes_checkpoints = True
        self._begins = False
        self._unfinished = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._turn = _Turn()
        self._thread: Thread | None = None
        self._end: weakref.finalize[..., SqliteConnection] = weakref.finalize(self, sqlite.close)

    @property
    def is_idle(self) -> bool:
        if self._unfinished or self._begins or not self._end.alive:
            return False
        return not self._sqlite.in_transaction

    @property
    def is_running(self) -> bool:
        return self._unfinished > 0

    async def execute(
        self, sql: str, parameters: Parameters | None = None, *, is_short: bool = False
    ) -> DriverRows:
        if is_short and (self._begins or self._sqlite.in_transaction or sql.startswith("SELECT")):
            found = self.run_here(sql, parameters)
            if found is not None:
                return found
        return await self._on_thread(partial(self._run_with_retries, sql, parameters))

    def run_here(self, sql: str, parameters: Parameters | None) -> DriverRows | None:
        """Run a short statement on the calling thread; None if it would have to wait for a lock."""
        try:
            return self._run(sql, parameters)
        except sqlite3.Error as exc:
            if is_busy(exc):
                return None
            raise translated(exc) from exc

    async def begin(self) -> None:
        if self._most_here:
            await asyncio.sleep(0)  # transactions that wait for nothing must not keep the loop from others
        self._begins = self._is_short = True

    async def commit(self) -> None:
        if self._left_here and self._is_short and self._sqlite.in_transaction:
            self._left_here -= 1
            self._make_checkpoints(False)
            if self.run_here("COMMIT", None) is not None:
                return
        await self._finish("COMMIT")

    async def rollback(self) -> None:
        await self._finish("ROLLBACK")

    async def answers(self) -> bool:
        return True  # a file does not go away

    def discard(self) -> None:
        self._end()  # if there is a thread, it closes the connection after the running statement

    async def close(self) -> None:
        if self._thread is None and not self._end.alive:
            return
        # On a thread, because the last connection writes the log back to the file.
        thread = self._thread or self._start()
        self._end()
        await asyncio.to_thread(thread.join, CLOSE_STEP_SECONDS)
        if thread.is_alive():
            logger.bind(seconds=CLOSE_STEP_SECONDS).warning("sqlite_connection_abandoned")

    async def _finish(self, sql: str) -> None:
        self._begins = False
        if self._sqlite.in_transaction:
            self._left_here = self._most_here
            await self._on_thread(partial(self._end_transaction, sql))

    def _end_transaction(self, sql: str, _job: _Job) -> DriverRows:
        self._make_checkpoints(True)
        return self._run(sql, None)

    def _make_checkpoints(self, makes: bool) -> None:
        """Let commits make a checkpoint if the log is long, or let them make none."""
        if self._makes_checkpoints != makes:
            self._sqlite.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES if makes else 0}").close()
            self._makes_checkpoints = makes

    def _run(self, sql: str, parameters: Parameters | None) -> DriverRows:
        """Run a statement on the calling thread, after BEGIN if the transaction has not begun."""
        cursor = self._sqlite.cursor()
        try:
            if self._begins:
                cursor.execute("BEGIN IMMEDIATE")
                self._begins = False
            cursor.execute(sql, parameters or ())
            rows = cursor.fetchall() if cursor.description else ()
            # Read after the last row: only then a statement with RETURNING has written all rows.
            return DriverRows(rows, cursor.rowcount)
        finally:
            cursor.close()  # an error that is kept would keep the cursor, and the cursor its locks

    def _run_with_retries(self, sql: str, parameters: Parameters | None, job: _Job) -> DriverRows:
        """Run a statement on the thread; wait for the locks of other connections."""
        end, attempts = None, 0
        self._make_checkpoints(True)
        while True:
            try:
                return self._run(sql, parameters)
            except sqlite3.OperationalError as exc:
                end = end or time.monotonic() + self._busy_seconds
                if not is_busy(exc) or job.is_cancelled or time.monotonic() > end:
                    raise
            time.sleep(_PAUSES[min(attempts, len(_PAUSES) - 1)])
            attempts += 1

    async def _on_thread(self, run: Callable[[_Job], DriverRows]) -> DriverRows:
        """Run a job; a cancellation interrupts it, and is raised when the job has ended."""
        if self._thread is None:
            self._start()
        self._is_short = False
        job = _Job(run, asyncio.get_running_loop())
        self._jobs.put(job)
        self._unfinished += 1
        try:
            return await job.answer
        except sqlite3.Error as exc:
            raise translated(exc) from exc
        except asyncio.CancelledError:
            if not job.is_over:
                with self._turn.lock:
                    job.is_stopped = True
                    if self._turn.job is job:
                        self._sqlite.interrupt()
                job.answer = job.loop.create_future()
                await outlast(job.answer)
            raise
        finally:
            self._unfinished -= 1

    def _start(self) -> Thread:
        self._end.detach()
        # The thread references neither this object nor the loop, so a connection that was not closed is
        # collected and ends its thread.
        arguments = (self._jobs, self._turn, self._sqlite)
        self._thread = Thread(target=_work, args=arguments, name="sqlite", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        return self._thread


class _Job:
    """One call to the thread."""

    __slots__ = ("answer", "is_over", "is_stopped", "loop", "run")

    def __init__(self, run: Callable[[_Job], DriverRows], loop: asyncio.AbstractEventLoop) -> None:
        self.run = run
        self.loop = loop
        self.answer: asyncio.Future[DriverRows] = loop.create_future()
        #: Whether the caller waits for the end after a cancellation, and for no result.
        self.is_stopped = False
        #: Whether the loop knows that the thread has ended it.
        self.is_over = False

    @property
    def is_cancelled(self) -> bool:
        """Whether the caller was cancelled; true before its task runs again."""
        return self.is_stopped or self.answer.cancelled()

    def end(self, rows: DriverRows | None, error: Exception | None) -> None:
        """Answer the caller; runs on the loop."""
        self.is_over = True
        if self.answer.done():  # cancelled a moment ago
            return
        if error is not None and not self.is_stopped:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(rows or DriverRows((), 0))


class _Turn:
    """The job that the thread runs now; the lock keeps it from ending while it is interrupted."""

    __slots__ = ("job", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.job: _Job | None = None


def _work(jobs: SimpleQueue[_Job | None], turn: _Turn, sqlite: sqlite3.Connection) -> None:
    while (job := jobs.get()) is not None:
        _do(job, turn)
        del job  # it references the loop
    sqlite.close()


def _do(job: _Job, turn: _Turn) -> None:
    rows, error = None, None
    with turn.lock:
        turn.job = job
    try:
        if not job.is_cancelled:
            rows = job.run(job)
    except Exception as exc:  # any error goes to the caller
        error = exc
    with turn.lock:
        turn.job = None
    with suppress(RuntimeError):  # the loop is closed, and no caller waits any more
        job.loop.call_soon_threadsafe(job.end, rows, error)


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
        error = f"other writers of this process kept SQLite busy for {seconds} s; use PostgreSQL"
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
        commits_here = settings.sqlite_synchronous == "normal"
        return SqliteConnection(sqlite, busy_seconds=seconds, commits_here=commits_here)

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
