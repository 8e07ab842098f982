"""Drops queues on `agent.events` whose watcher was killed, as part of the sweep."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from celery import Celery
from loguru import logger

from broker_config.settings import BrokerSettings
from messaging.event_watch import drop_abandoned

__all__ = ["WatchSweep"]

_PERIOD_SECONDS: Final = 60.0


class WatchSweep:
    """Drops abandoned queues of watchers once a minute."""

    def __init__(self, app: Celery, settings: BrokerSettings) -> None:
        self._app = app
        self._settings = settings
        self._next_at = time.monotonic()

    async def sweep(self) -> float | None:
        """Drop abandoned queues; returns the seconds until the next check."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _PERIOD_SECONDS
            dropped = await asyncio.to_thread(drop_abandoned, self._app, self._settings)
            if dropped:
                logger.bind(queues=dropped).info("abandoned_watchers_dropped")
        return self._next_at - time.monotonic()
