"""A FIFO semaphore with a time limit: for pooled connections and for SQLite's writer.

SQLite's busy handler polls with growing pauses and without order, so the writers of one event loop queue
here, and only processes compete for the lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from nekro_agent.errors import StorageUnavailableError

__all__ = ["FifoSemaphore"]


class FifoSemaphore:
    """Admits ``size`` callers at a time, or neighbouring callers that share, together.

    Unlike asyncio's semaphores it does not keep its event loop alive.
    """

    def __init__(self, size: int, *, seconds: float, error: str) -> None:
        """
        Args:
            seconds: how long a caller waits.
            error: text of the error after that time.
        """
        self._size = size
        self._seconds = seconds
        self._error = error
        self._queue: deque[tuple[asyncio.Future[None], bool]] = deque()
        self._held = 0
        self._is_shared = False

    async def acquire(self, *, shared: bool = False) -> None:
        """Wait for admission; ``release`` must follow.

        Args:
            shared: together with other callers that share, while no other caller waits.

        Raises:
            StorageUnavailableError: others held it for too long.
        """
        if not self._queue and self._admits(shared):
            self._admit(shared)
            return
        admitted = asyncio.get_running_loop().create_future()
        self._queue.append((admitted, shared))
        try:
            async with asyncio.timeout(self._seconds):
                await admitted
        except BaseException as exc:
            if admitted.done() and not admitted.cancelled():
                self.release()  # it was admitted at the same moment
            else:
                with suppress(ValueError):  # `_admit_next` has removed it
                    self._queue.remove((admitted, shared))
                self._admit_next()
            if isinstance(exc, TimeoutError):
                raise StorageUnavailableError(self._error) from exc
            raise

    def release(self) -> None:
        """Admit the next callers."""
        self._held -= 1
        self._admit_next()

    def _admits(self, shared: bool) -> bool:
        return self._held < self._size or (shared and self._is_shared)

    def _admit(self, shared: bool) -> None:
        self._held += 1
        self._is_shared = shared

    def _admit_next(self) -> None:
        while self._queue and self._admits(self._queue[0][1]):
            admitted, shared = self._queue.popleft()
            if not admitted.done():  # otherwise cancelled; it is about to notice
                self._admit(shared)
                admitted.set_result(None)
