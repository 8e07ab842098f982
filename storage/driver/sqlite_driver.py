"""aiosqlite with one thread call per statement, and none for short statements that need not wait.

aiosqlite passes every call to the connection's thread and waits for it. A statement takes four calls
(cursor, execute, fetch, close), of which one does the work; here the thread does all four in one call.
Short statements (``storage.driver.fixed_statement``) run on the calling thread unless they must wait for a
lock.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, Final, Self

import aiosqlite

__all__ = ["StepConnection", "connect", "is_busy"]

#: Whether SQLite was built so that several threads may share a connection.
_IS_SERIALIZED: Final = sqlite3.threadsafety == 3
#: Mask of the primary result code in SQLite's extended result codes.
_PRIMARY_CODE: Final = 0xFF


class StepConnection(aiosqlite.Connection):
    """A connection whose cursors call the thread only for their statement."""

    #: A statement without rows that runs before the next one, in the same call to the thread.
    precede: str | None = None
    _is_stopped = False

    def stop(self) -> asyncio.Future[None] | None:
        """End the thread, once; returns None outside of an event loop.

        ``close`` waits for the returned future. A second stop request would be queued after the thread has
        ended, so a second concurrent ``close`` would wait forever.
        """
        if not self._is_stopped:
            self._is_stopped = True
            return super().stop()
        try:
            ended = asyncio.get_running_loop().create_future()
        except RuntimeError:  # the garbage collector's call
            return None
        ended.set_result(None)
        return ended

    def cursor(self) -> StepCursor:  # type: ignore[override]  # has everything that SQLAlchemy uses
        """Return a cursor for one statement."""
        return StepCursor(self)

    async def execute(  # type: ignore[override]  # aiosqlite returns its own cursor class
        self, statement: str, parameters: Sequence[Any] = ()
    ) -> StepCursor:
        """Run a short statement on the calling thread, or on the connection's thread if it must wait.

        A round trip to a thread takes several times as long as such a statement, and longer if a processor
        went idle meanwhile. The calling thread waits neither for a lock nor for a commit.
        """
        cursor = StepCursor(self)
        if not (_IS_SERIALIZED and self._runs_here(cursor, statement, parameters)):
            await cursor.execute(statement, parameters)
        return cursor

    async def commit(self) -> None:
        """Commit, if a transaction is open."""
        if self._conn.in_transaction:
            await super().commit()

    async def rollback(self) -> None:
        """Roll back, if a transaction is open."""
        if self._conn.in_transaction:
            await super().rollback()

    def _runs_here(self, cursor: StepCursor, statement: str, parameters: Sequence[Any]) -> bool:
        """Run a statement on the calling thread if it need not wait; returns whether it ran."""
        connection, precede = self._conn, self.precede

        def run(on: sqlite3.Cursor) -> None:
            on.execute(statement, parameters)

        if connection.in_transaction:
            cursor.run(run)
            return True
        if precede is None and not statement.startswith("SELECT"):
            return False  # in autocommit mode it would wait for the commit
        limit = self._busy_milliseconds
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            cursor.run(run)
        except sqlite3.OperationalError as exc:
            if not is_busy(exc):
                raise
            self.precede = precede
            return False
        finally:
            connection.execute(f"PRAGMA busy_timeout = {limit}")
        return True

    @cached_property
    def _busy_milliseconds(self) -> int:
        (milliseconds,) = self._conn.execute("PRAGMA busy_timeout").fetchone()
        return int(milliseconds)


class StepCursor:
    """The part of a cursor that SQLAlchemy uses; holds all rows of its statement."""

    arraysize = 1

    def __init__(self, connection: StepConnection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: tuple[Any, ...] | None = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def execute(self, statement: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement and fetch all of its rows."""
        await self._step(lambda cursor: cursor.execute(statement, parameters))

    async def executemany(self, statement: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each of ``parameters``."""
        await self._step(lambda cursor: cursor.executemany(statement, parameters))

    async def fetchall(self) -> list[Any]:
        """Return the rows; a second call returns none."""
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """Do nothing: ``run`` closed the cursor."""

    async def _step(self, run: Callable[[sqlite3.Cursor], object]) -> None:
        await self._connection._execute(partial(self.run, run))  # type: ignore[no-untyped-call]

    def run(self, run: Callable[[sqlite3.Cursor], object]) -> None:
        """Run ``precede`` and a statement on the calling thread, and fetch all rows."""
        cursor = self._connection._conn.cursor()
        precede, self._connection.precede = self._connection.precede, None
        try:
            if precede is not None:
                cursor.execute(precede)
            run(cursor)
            self.description = cursor.description
            self._rows = cursor.fetchall() if cursor.description else []
            # Read after the last row: only then a statement with RETURNING has written all rows.
            self.rowcount, self.lastrowid = cursor.rowcount, cursor.lastrowid
        finally:
            cursor.close()


def is_busy(error: sqlite3.Error) -> bool:
    """Whether a statement was refused because another connection holds a lock."""
    code: int = getattr(error, "sqlite_errorcode", 0)  # errors raised by the sqlite3 module itself have none
    return code & _PRIMARY_CODE == sqlite3.SQLITE_BUSY


def connect(database: str, **options: Any) -> StepConnection:
    """Return an awaitable connection; options are those of ``sqlite3.connect``."""
    # Two threads use it alternately, never concurrently.
    connect_to = partial(sqlite3.connect, database, **{**options, "check_same_thread": False})
    connection = StepConnection(connect_to, 64)
    # Its thread must not keep the process alive. Before aiosqlite 0.22 the connection was the thread.
    thread: Any = getattr(connection, "_thread", connection)
    thread.daemon = True
    return connection
