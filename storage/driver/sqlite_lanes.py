"""Runs single statements on SQLite on up to three connections per loop, apart from the pool.

One connection reads on the event loop itself, because finding a value takes less time than a thread call.
The other two have a thread each, which runs statements in order: one for writes, one for reads that must
wait for a lock. Concurrent callers share these connections, since a single statement keeps no state on
its connection. They are not taken from the pool, because they would never be returned to it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from sqlalchemy import URL, Connection

from broker_config.settings import DatabaseSettings
from nekro_agent.durations import CLOSE_STEP_SECONDS
from storage.driver import sqlite
from storage.driver.fixed_statement import Row
from storage.driver.limits import took_too_long
from storage.driver.sqlite_driver import is_busy
from storage.driver.urls import sync_url
from storage.driver.write_gate import WriteGate

__all__ = ["SqliteLanes"]


logger = logging.getLogger(__name__)


class SqliteLanes:
    """Implements ``storage.engine.SingleRunner``."""

    def __init__(self, url: URL, settings: DatabaseSettings, gate: WriteGate) -> None:
        self._settings = settings
        self._gate = gate
        self._engine = sqlite.create_sync(sync_url(url), settings)
        self._here: Connection | None = None
        self._reader: _Lane | None = None
        self._writer: _Lane | None = None

    async def fetch_one(self, sql: str, parameters: Any, *, writes: bool) -> Row | None:
        """Run a statement; returns its first row. A statement whose caller was cancelled is not started."""
        if not writes:
            try:
                return await self._read_here(sql, parameters)
            except sqlite3.OperationalError as exc:
                if not is_busy(exc):
                    raise
            self._reader = self._reader or self._open()
            return await self._reader.fetch_one(sql, parameters)
        self._writer = self._writer or self._open()
        await self._gate.join()
        try:
            return await self._writer.fetch_one(sql, parameters)
        finally:
            self._gate.leave()

    async def _read_here(self, sql: str, parameters: Any) -> Row | None:
        while self._here is None:
            opened = await asyncio.to_thread(self._connect_here)
            if self._here is None:
                self._here = opened
            else:  # another caller was faster
                opened.close()
        return _fetch_one(self._here.connection.driver_connection, sql, parameters)

    def _connect_here(self) -> Connection:
        connection = self._engine.connect()
        connection.exec_driver_sql("PRAGMA busy_timeout = 0")
        return connection

    async def close(self) -> None:
        """Close all connections."""
        if self._here is not None:
            self._here.close()
            self._here = None
        lanes = [lane for lane in (self._reader, self._writer) if lane is not None]
        self._reader = self._writer = None
        for lane in lanes:
            await lane.close()

    def _open(self) -> _Lane:
        return _Lane(self._engine.connect, self._settings.transaction_timeout_seconds)


class _Job(NamedTuple):
    sql: str
    parameters: Any
    answer: asyncio.Future[Row | None]


class _Lane:
    """One connection with its own thread."""

    def __init__(self, connect: Callable[[], Connection], limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=_work, args=(connect, self._jobs), name="sqlite-lane", daemon=True)
        self._thread.start()
        # The thread references neither lane nor loop, so an unclosed lane is collected and ends its thread.
        self._stop = weakref.finalize(self, self._jobs.put, None)

    async def fetch_one(self, sql: str, parameters: Any) -> Row | None:
        """Run a statement after those queued before it; returns its first row."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Row | None] = loop.create_future()
        # A timer costs a third of `asyncio.timeout`.
        alarm = loop.call_later(self._limit_seconds, _give_up, answer, self._limit_seconds)
        self._jobs.put(_Job(sql, parameters, answer))
        try:
            return await answer
        finally:
            alarm.cancel()

    async def close(self) -> None:
        """Run queued statements, then close the connection; a thread that takes too long is abandoned."""
        self._stop()
        await asyncio.to_thread(self._thread.join, CLOSE_STEP_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "thread %s did not end within %g s; abandoned", self._thread.name, CLOSE_STEP_SECONDS
            )


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
                    row = _fetch_one(driver, job.sql, job.parameters)
                except Exception as exc:  # any error goes to the caller
                    error = exc
                job.answer.get_loop().call_soon_threadsafe(_answer, job.answer, row, error)
                del row, error
            del job  # its future references the loop
    except RuntimeError:
        return  # the loop is closed, and no caller waits any more
    finally:
        if connection is not None:
            connection.close()


def _fetch_one(driver: Any, sql: str, parameters: Any) -> Row | None:
    # Fetch all rows; otherwise the statement and its transaction would stay open.
    return next(iter(driver.execute(sql, parameters).fetchall()), None)


def _answer(answer: asyncio.Future[Row | None], row: Row | None, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(row)
    else:
        answer.set_exception(error)


def _give_up(answer: asyncio.Future[Row | None], seconds: float) -> None:
    _answer(answer, None, took_too_long(seconds))
