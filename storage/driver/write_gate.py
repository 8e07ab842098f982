"""Orders the writers of one event loop to SQLite.

SQLite allows one writer. Its busy handler polls with growing pauses and without order, so the writers of
one loop queue here, and only processes compete in the busy handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.driver.limits import acquire

__all__ = ["WriteGate"]


class WriteGate:
    """Admits transactions one at a time, in order, and writers that share a connection together."""

    def __init__(self, settings: DatabaseSettings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._together = 0

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Exclude every other writer of the loop.

        Raises:
            StorageUnavailableError: other writers held the gate for longer than ``pool_timeout_seconds``.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    async def join(self) -> None:
        """Enter together with other writers that joined; `leave` must follow.

        Raises:
            StorageUnavailableError: other writers held the gate for longer than ``pool_timeout_seconds``.
        """
        if self._together and not self._waiting:
            self._together += 1
            return
        if self._lock.locked():
            await self._acquire()
        else:
            await self._lock.acquire()
        self._together = 1

    def leave(self) -> None:
        """Leave the group of writers that joined; the last one releases the gate."""
        self._together -= 1
        if not self._together:
            self._lock.release()

    async def _acquire(self) -> None:
        self._waiting += 1
        try:
            await acquire(self._lock, self._settings.pool_timeout_seconds, self._kept_busy)
        finally:
            self._waiting -= 1

    def _kept_busy(self) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"other writers of this process kept SQLite busy for {self._settings.pool_timeout_seconds} s; "
            "raise NEKRO_DATABASE__POOL_TIMEOUT_SECONDS or use PostgreSQL"
        )
