"""Single statements on SQLite: two connections of a loop, one that reads and one that writes.

Each lives on a thread, which takes statements in the order they come. Any number of them is under way at
once, each for one visit to the thread; nobody needs a connection alone, since a single statement leaves
nothing behind on it. They are no connections of the pool, as they would never go back to it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from sqlalchemy import URL, Connection

from broker_config.settings import DatabaseSettings
from storage import sqlite
from storage.limits import took_too_long
from storage.urls import sync_url
from storage.write_gate import WriteGate

__all__ = ["SqliteLanes"]

_Row = tuple[Any, ...]


class SqliteLanes:
    """Implements ``storage.engine.SingleRunner``."""

    def __init__(self, url: URL, settings: DatabaseSettings, gate: WriteGate) -> None:
        self._settings = settings
        self._gate = gate
        self._engine = sqlite.create_sync(sync_url(url), settings)
        self._reader: _Lane | None = None
        self._writer: _Lane | None = None

    async def fetch_one(self, sql: str, parameters: Any, *, writes: bool) -> _Row | None:
        """Run a statement; returns its first row. One that nobody waits for any more is not begun."""
        if not writes:
            self._reader = self._reader or self._open()
            return await self._reader.fetch_one(sql, parameters)
        self._writer = self._writer or self._open()
        await self._gate.join()
        try:
            return await self._writer.fetch_one(sql, parameters)
        finally:
            self._gate.leave()

    async def close(self) -> None:
        """Close both connections."""
        lanes = [lane for lane in (self._reader, self._writer) if lane is not None]
        self._reader = self._writer = None
        for lane in lanes:
            await lane.close()

    def _open(self) -> _Lane:
        return _Lane(self._engine.connect, self._settings.transaction_timeout_seconds)


class _Job(NamedTuple):
    sql: str
    parameters: Any
    answer: asyncio.Future[_Row | None]


class _Lane:
    """One connection on a thread of its own."""

    def __init__(self, connect: Callable[[], Connection], limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=_work, args=(connect, self._jobs), name="sqlite-lane", daemon=True)
        self._thread.start()
        # The thread knows neither lane nor loop, so one that nobody closed ends with its last user.
        self._stop = weakref.finalize(self, self._jobs.put, None)

    async def fetch_one(self, sql: str, parameters: Any) -> _Row | None:
        """Run a statement in its turn; returns its first row."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Row | None] = loop.create_future()
        # A timer costs a third of what `asyncio.timeout` does.
        alarm = loop.call_later(self._limit_seconds, _give_up, answer, self._limit_seconds)
        self._jobs.put(_Job(sql, parameters, answer))
        try:
            return await answer
        finally:
            alarm.cancel()

    async def close(self) -> None:
        """Run what is queued, then close the connection."""
        self._stop()
        await asyncio.to_thread(self._thread.join)


def _work(connect: Callable[[], Connection], jobs: SimpleQueue[_Job | None]) -> None:
    connection: Connection | None = None
    driver: Any = None
    try:
        while (job := jobs.get()) is not None:
            if not job.answer.done():
                row, error = None, None
                try:
                    if connection is None:
                        connection = connect()
                        driver = connection.connection.driver_connection
                    # All rows, or the statement would stay open and its transaction with it.
                    row = next(iter(driver.execute(job.sql, job.parameters).fetchall()), None)
                except Exception as exc:  # whatever it is, who asked gets it
                    error = exc
                job.answer.get_loop().call_soon_threadsafe(_answer, job.answer, row, error)
                del row, error
            del job  # its future holds the loop
    except RuntimeError:
        return  # the loop has ended, and with it whoever waited
    finally:
        if connection is not None:
            connection.close()


def _answer(answer: asyncio.Future[_Row | None], row: _Row | None, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(row)
    else:
        answer.set_exception(error)


def _give_up(answer: asyncio.Future[_Row | None], seconds: float) -> None:
    _answer(answer, None, took_too_long(seconds))
