"""Keeps the shared time of this process correct and measures the offset of the host's clock."""

from __future__ import annotations

import asyncio
from typing import Final

from loguru import logger

from broker_config.redis_library import redis
from broker_config.settings import BrokerSettings
from nekro.app.background import BackgroundLoop
from nekro.base.metrics import is_counting, metrics
from nekro.base.tasks import log_errors
from nekro.broker.broker_figures import read_broker_clock
from nekro_agent.shared_clock import Reading
from storage.engine import Database, follow_database_clock

__all__ = ["WARN_SECONDS", "ClockWatch"]

#: How often the clocks are compared: a stepped clock is noticed before calls miss their deadlines.
_PERIOD_SECONDS: Final = 30.0
#: Difference beyond which the log and the doctor warn.
WARN_SECONDS: Final = 1.0


class ClockWatch:
    """Compares this host's clock with the database's, which the shared time follows, and the broker's."""

    def __init__(self, database: Database, broker: BrokerSettings, background: BackgroundLoop) -> None:
        self._database = database
        self._broker = broker
        self._background = background
        self._is_off = False

    async def compare(self) -> None:
        """Follow the database's clock; await it before this process compares times.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        reading = await follow_database_clock(self._database)
        if reading is not None:
            self._report("database", reading)

    def start(self) -> None:
        """Compare every 30 seconds on the background loop, until that loop is closed."""
        self._background.submit(self._keep())

    async def _keep(self) -> None:
        while True:
            with log_errors("broker_clock_not_read"):
                await self._measure_broker()
            await asyncio.sleep(_PERIOD_SECONDS)
            with log_errors("database_clock_not_read"):
                await self.compare()

    async def _measure_broker(self) -> None:
        if not is_counting():
            return
        try:
            reading = await read_broker_clock(self._broker)
        except (redis.RedisError, OSError) as exc:
            logger.bind(error=str(exc)).warning("broker_clock_not_read")
            return
        if reading is not None:
            metrics().clock_offset_seconds.labels("broker").set(reading.ahead_seconds)

    def _report(self, peer: str, reading: Reading) -> None:
        seconds = reading.ahead_seconds
        metrics().clock_offset_seconds.labels(peer).set(seconds)
        is_off = abs(seconds) - reading.uncertain_seconds > WARN_SECONDS
        if is_off and not self._is_off:
            logger.bind(peer=peer, ahead_seconds=round(seconds, 3)).warning("host_clock_off")
        self._is_off = is_off
