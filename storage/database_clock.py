"""Reads the database's clock and makes it the shared time of this process."""

from __future__ import annotations

import time
from collections.abc import Callable

from nekro_agent.shared_clock import Reading, read_clock, share_time
from storage.caller_reads import NOW, time_of
from storage.engine import Database

__all__ = ["follow_database_clock", "read_database_clock"]


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
