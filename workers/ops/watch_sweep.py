"""Drops queues on `agent.events` whose watcher was killed, as part of the sweep."""

from __future__ import annotations

import asyncio
import time

from celery import Celery
from loguru import logger

from broker_config.keys import ABANDONED_SECONDS
from broker_config.settings import BrokerSettings
from nekro.broker.event_watch import drop_abandoned

__all__ = ["WatchSweep"]


class WatchSweep:
    """Drops abandoned queues of watchers, as often as such a queue expires."""

    def __init__(self, app: Celery, settings: BrokerSettings) -> None:
        self._app = app
        self._settings = settings
        self._next_at = time.monotonic()

    async def sweep(self) -> float | None:
        """Drop abandoned queues; returns the seconds until the next check."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + ABANDONED_SECONDS
            dropped = await asyncio.to_thread(drop_abandoned, self._app, self._settings)
            if dropped:
                logger.bind(queues=dropped).info("abandoned_watchers_dropped")
        return self._next_at - time.monotonic()
