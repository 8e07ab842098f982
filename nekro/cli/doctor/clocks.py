"""Compare this host's clock with the clocks of the broker and the database."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import redis

from broker_config.settings import Settings
from nekro.app.ops.clock_watch import WARN_SECONDS
from nekro.broker.broker_figures import read_broker_clock
from nekro.cli.doctor.check import Check, Verdict
from nekro_agent.errors import NekroError, SettingsError, StorageError
from storage.database_clock import follow_database_clock, read_database_clock
from storage.engine import Database

__all__ = ["clock_checks", "clock_offsets", "follow_shared_time"]


def follow_shared_time(settings: Settings) -> None:
    """Make this process use the database's clock; when the database does not answer, the host's is used.

    For commands that write or compare timestamps of the system without opening the services. Blocks.
    """

    async def follow() -> None:
        async with Database(settings.database, settings.data_dir) as database:
            with contextlib.suppress(StorageError):
                await follow_database_clock(database)

    asyncio.run(follow())


async def clock_checks(settings: Settings) -> list[Check]:
    """Return one check for each clock that can be compared."""
    try:
        offsets = await clock_offsets(settings)
    except SettingsError:  # reported by the check of the database
        return []
    return [_check(f"clock of the {name}", seconds) for name, seconds in offsets.items()]


def _check(name: str, ahead_seconds: float) -> Check:
    off = abs(ahead_seconds)
    if off <= WARN_SECONDS:
        return Check(name=name, verdict=Verdict.OK, detail=f"within {WARN_SECONDS:g} s of this host's")
    side = "ahead of" if ahead_seconds > 0 else "behind"
    return Check(
        name=name,
        verdict=Verdict.FAILED if off > 10 * WARN_SECONDS else Verdict.WARNING,
        detail=f"this host's clock is {off:.1f} s {side} it; deadlines of calls follow the database's clock, "
        "but plugins, logs and files here use this host's",
        fix="synchronise the clocks of all hosts (`timedatectl set-ntp true`, or chrony)",
    )


async def clock_offsets(settings: Settings, *, clock: Callable[[], float] = time.time) -> dict[str, float]:
    """Return by how many seconds this host's clock is ahead of each server's clock; negative: behind.

    Left out are servers that do not answer, and embedded Redis and SQLite, which use this host's clock.

    Args:
        clock: this host's, in seconds since 1970.
    """
    offsets = {}
    with contextlib.suppress(redis.RedisError, OSError):
        reading = await read_broker_clock(settings.broker, host_clock=clock)
        if reading is not None:
            offsets["broker"] = reading.ahead_seconds
    database = Database(settings.database, settings.data_dir)
    if not database.is_sqlite:
        with contextlib.suppress(NekroError):
            reading = await read_database_clock(database, host_clock=clock)
            offsets["database"] = reading.ahead_seconds
        await database.dispose()
    return offsets
