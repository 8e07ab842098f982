"""Comparing this host's clock with those of the broker and the database, which all workers share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final

import redis
import redis.asyncio
from sqlalchemy import select

from broker_config.settings import Settings
from broker_config.urls import client_url, is_redis
from cli.checks import Check, Verdict
from nekro_agent.errors import NekroError, SettingsError
from storage.clock import now
from storage.engine import Database

__all__ = ["clock_checks", "clock_offsets"]

#: Differences between clocks that cost calls a part of their time, and that make workers refuse them.
_WARN_SECONDS: Final = 1.0
_FAIL_SECONDS: Final = 10.0


async def clock_checks(settings: Settings) -> list[Check]:
    """Return a line of the doctor for each clock that can be compared."""
    try:
        offsets = await clock_offsets(settings)
    except SettingsError:  # the check of the database says it
        return []
    return [_check(f"clock of the {name}", seconds) for name, seconds in offsets.items()]


def _check(name: str, ahead_seconds: float) -> Check:
    off = abs(ahead_seconds)
    if off <= _WARN_SECONDS:
        return Check(name=name, verdict=Verdict.OK, detail=f"within {_WARN_SECONDS:g} s of this host's")
    side = "ahead of" if ahead_seconds > 0 else "behind"
    return Check(
        name=name,
        verdict=Verdict.FAILED if off > _FAIL_SECONDS else Verdict.WARNING,
        detail=f"this host's clock is {off:.1f} s {side} it; each host judges deadlines of calls by its own",
        mend="synchronise the clocks of all hosts (`timedatectl set-ntp true`, or chrony)",
    )


async def clock_offsets(settings: Settings, *, clock: Callable[[], float] = time.time) -> dict[str, float]:
    """Return by how many seconds this host's clock is ahead of each other one; negative: behind.

    What does not answer, or runs on this host by our own doing (embedded Redis, SQLite), is left out.

    Args:
        clock: this host's, in seconds since 1970.
    """
    offsets = {}
    if settings.broker.url is not None and is_redis(settings.broker.url):
        url, broker = client_url(settings.broker.url), settings.broker
        with contextlib.suppress(redis.RedisError, OSError):
            async with redis.asyncio.Redis.from_url(
                url,
                socket_connect_timeout=broker.connect_timeout_seconds,
                socket_timeout=broker.socket_timeout_seconds,
            ) as client:
                await client.ping()  # connected: the question alone is timed
                offsets["broker"] = await _ahead(clock, lambda: _redis_time(client))
    database = Database(settings.database, settings.data_dir)
    if not database.is_sqlite:
        with contextlib.suppress(NekroError):
            await _database_time(database)
            offsets["database"] = await _ahead(clock, lambda: _database_time(database))
        await database.dispose()
    return offsets


async def _ahead(clock: Callable[[], float], ask: Callable[[], Awaitable[float]]) -> float:
    """Take the other clock to have been read in the middle of the exchange.

    Source: Cristian's algorithm; wrong by half the exchange at most.
    """
    before = clock()
    theirs = await ask()
    return (before + clock()) / 2 - theirs


async def _redis_time(client: redis.asyncio.Redis) -> float:
    seconds, microseconds = await client.time()
    return float(seconds + microseconds / 1_000_000)


async def _database_time(database: Database) -> float:
    async with database.read() as transaction:
        told: datetime = (await transaction.connection.execute(select(now()))).scalar_one()
    return told.timestamp()
