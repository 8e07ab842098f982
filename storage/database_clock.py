"""Reads the database's clock and makes it the shared time of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from sqlalchemy import Select, select

from nekro_agent.shared_clock import Reading, read_clock, share_time
from storage.driver.statements import SingleStatement
from storage.engine import Database
from storage.sql import now

__all__ = ["follow_database_clock", "read_database_clock"]


def _now(_dialect: str) -> Select[tuple[datetime]]:
    return select(now().label("now"))


_NOW: Final = SingleStatement(_now, writes=False)


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

    async def ask() -> float:
        answer: datetime = await database.run(_NOW, {})
        return answer.timestamp()

    return await read_clock(ask, host_clock=host_clock)
