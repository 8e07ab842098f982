"""aiosqlite with one step per statement.

aiosqlite hands every call to the connection's thread and waits for it. A statement is four calls
(cursor, execute, fetch, close), of which one does the work; here the thread does all four at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import aiosqlite

__all__ = ["StepConnection", "connect"]


class StepConnection(aiosqlite.Connection):
    """A connection whose cursors need no call to the thread but for their statement."""

    #: A statement without rows that goes before the next one, in the same call to the thread.
    precede: str | None = None

    def cursor(self) -> StepCursor:  # type: ignore[override]  # SQLAlchemy asks for no more than this one has
        """Return a cursor for one statement."""
        return StepCursor(self)

    async def execute(  # type: ignore[override]  # what aiosqlite returns is a cursor of its own
        self, statement: str, parameters: Sequence[Any] = ()
    ) -> StepCursor:
        """Run a statement; its rows are there when this returns."""
        cursor = StepCursor(self)
        await cursor.execute(statement, parameters)
        return cursor


class StepCursor:
    """As much of a cursor as SQLAlchemy uses; holds a statement's rows once it ran."""

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
        """Run a statement and take all of its rows."""
        await self._step(lambda cursor: cursor.execute(statement, parameters))

    async def executemany(self, statement: str, parameters: Sequence[Sequence[Any]]) -> None:
        """Run a statement once for each of ``parameters``."""
        await self._step(lambda cursor: cursor.executemany(statement, parameters))

    async def fetchall(self) -> list[Any]:
        """Hand the rows out, once."""
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        """Do nothing: what was open was closed by the step."""

    async def _step(self, run: Callable[[sqlite3.Cursor], object]) -> None:
        step = partial(self._run, run, self._connection._conn)
        await self._connection._execute(step)  # type: ignore[no-untyped-call]

    def _run(self, run: Callable[[sqlite3.Cursor], object], connection: sqlite3.Connection) -> None:
        cursor = connection.cursor()
        precede, self._connection.precede = self._connection.precede, None
        try:
            if precede is not None:
                cursor.execute(precede)
            run(cursor)
            self.description = cursor.description
            self._rows = cursor.fetchall() if cursor.description else []
            # Counted when the last row was read: that is when RETURNING has written all.
            self.rowcount, self.lastrowid = cursor.rowcount, cursor.lastrowid
        finally:
            cursor.close()


def connect(database: str, **options: Any) -> StepConnection:
    """Return a connection to await; options are those of ``sqlite3.connect``."""
    connection = StepConnection(partial(sqlite3.connect, database, **options), 64)
    # Its thread must not keep the process alive. Before version 0.22 the connection was the thread.
    thread: Any = getattr(connection, "_thread", connection)
    thread.daemon = True
    return connection
