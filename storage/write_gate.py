"""Who may write to SQLite next, within one event loop.

SQLite has one writer. Waiting for it in its busy handler means polling with growing pauses and no order, so
writers of one loop queue here and only processes compete there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.limits import acquire

__all__ = ["WriteGate"]


class WriteGate:
    """Lets transactions through one by one, in order, and writers that share a connection together."""

    def __init__(self, settings: DatabaseSettings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._together = 0

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Keep every other writer of the loop out.

        Raises:
            StorageUnavailableError: others wrote for too long.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    async def join(self) -> None:
        """Enter beside those that joined before; `leave` must follow.

        Raises:
            StorageUnavailableError: others wrote for too long.
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
        """The last one to leave opens the gate."""
        self._together -= 1
        if not self._together:
            self._lock.release()

    async def _acquire(self) -> None:
        self._waiting += 1
        try:
            await acquire(self._lock, self._settings.busy_timeout_seconds, self._kept_busy)
        finally:
            self._waiting -= 1

    def _kept_busy(self) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"other writers of this process kept SQLite busy for {self._settings.busy_timeout_seconds} s; "
            "raise NEKRO_DATABASE__BUSY_TIMEOUT_SECONDS or use PostgreSQL"
        )
