"""The connections of one event loop: opened when needed, kept, checked, and closed with the loop.

``FifoSemaphore`` limits pooled connections and SQLite's writers. SQLite's busy handler polls with growing
pauses and without order, so the writers of one event loop queue here, and only processes compete for the
lock."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Final, Generic, TypeVar

from loguru import logger

from broker_config.settings import DatabaseSettings
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS, POLL_SECONDS
from nekro_agent.errors import StorageUnavailableError
from storage.driver.connection import DriverConnection, DriverRows
from storage.driver.values import Parameters

__all__ = [
    "FifoSemaphore",
    "Pool",
    "connection_semaphore",
    "limited",
]


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


C = TypeVar("C", bound=DriverConnection)


#: How much later than its connection a transaction's task is stopped, so that the driver's error comes first.
_GRACE_SECONDS: Final = 1.0


def connection_semaphore(size: int, settings: DatabaseSettings) -> FifoSemaphore:
    """Return the semaphore of a pool with at most ``size`` connections."""
    seconds = settings.pool_timeout_seconds
    error = (
        f"no database connection was free within {seconds} s; "
        "raise NEKRO_DATABASE__POOL_SIZE or lower the worker's concurrency"
    )
    return FifoSemaphore(size, seconds=seconds, error=error)


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """Stop a block that waits for something other than its connection, which may have its own time limit.

    Raises:
        StorageUnavailableError: the block took longer than ``seconds`` and a grace period.
    """
    try:
        async with asyncio.timeout(seconds + _GRACE_SECONDS) as limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise StorageUnavailableError(
            f"a transaction took longer than {seconds} s, the limit of transactions"
        ) from exc


class Pool(Generic[C]):
    """Lends connections of one event loop to callers in order."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[C]],
        semaphore: FifoSemaphore,
        *,
        cut_later: Callable[[C], asyncio.TimerHandle] | None = None,
    ) -> None:
        """Open nothing.

        Args:
            connect: opens a connection; leaves none open when it is cancelled.
            semaphore: limits the connections in use.
            cut_later: starts the time limit of a use; the pool cancels it at the end of the use.
        """
        self.semaphore = semaphore
        self._connect = connect
        self._cut_later = cut_later
        self._idle: list[C] = []
        self._in_use: dict[C, asyncio.TimerHandle | None] = {}
        self._opened: weakref.WeakSet[C] = weakref.WeakSet()
        self._doubted_at = 0.0
        self._is_closed = False

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[C]:
        """Lend a connection for reading.

        Raises:
            StorageUnavailableError: none was free in time, or the database does not answer.
        """
        connection = await self._take()
        try:
            yield connection
        finally:
            self._give_back(connection)

    def writer(self) -> AbstractAsyncContextManager[C]:
        """Lend a connection for writing.

        Raises:
            StorageUnavailableError: as for ``reader``.
        """
        return self.reader()

    async def run(self, sql: str, parameters: Parameters, *, writes: bool) -> DriverRows:
        """Run a short statement as a transaction of its own.

        Raises:
            StorageUnavailableError: as for ``reader`` and ``DriverConnection.execute``.
        """
        connection = await self._take()
        try:
            return await connection.execute(sql, parameters, is_short=True)
        finally:
            self._give_back(connection)

    @property
    def idle(self) -> C | None:
        """The connection that would be lent next; None if one would have to be opened."""
        return self._idle[-1] if self._idle else None

    async def _take(self) -> C:
        await self.semaphore.acquire()
        try:
            connection = await self._kept() or await self._open()
        except BaseException:
            self.semaphore.release()
            raise
        self._in_use[connection] = None if self._cut_later is None else self._cut_later(connection)
        return connection

    def _give_back(self, connection: C) -> None:
        cut = self._in_use.pop(connection)
        if cut is not None:
            cut.cancel()
        if connection.is_idle and not self._is_closed:
            connection.rests_since = time.monotonic()
            self._idle.append(connection)
        else:  # it is broken, or closed because of a cancellation
            self._doubted_at = time.monotonic()  # others may be broken too
            connection.discard()
        self.semaphore.release()

    async def close(self) -> None:
        """Close the connections that are not in use; the others are closed when they are given back.

        Waits for statements that run, so that those of cancelled callers end before the loop does.
        """
        self._is_closed = True
        end = time.monotonic() + CLOSE_STEP_SECONDS
        # Notifying the pool of the end of each statement would cost more.
        while (running := self._running()) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        if running:
            logger.bind(connections=running, seconds=CLOSE_STEP_SECONDS).warning(
                "database_connections_abandoned"
            )
        closing = set(self._opened).difference(self._in_use)
        self._idle.clear()
        await asyncio.gather(*(connection.close() for connection in closing))

    def abandon(self) -> None:
        """Discard the connections of a loop that has ended."""
        self._is_closed = True
        for connection in set(self._opened):
            connection.discard()
        self._idle.clear()

    def _running(self) -> int:
        return sum(connection.is_running for connection in self._opened)

    async def _kept(self) -> C | None:
        while self._idle:
            connection = self._idle.pop()
            since = connection.rests_since
            is_trusted = since > self._doubted_at and time.monotonic() - since < FRESH_SECONDS
            if is_trusted or await connection.answers():
                return connection
            self._doubted_at = time.monotonic()
        return None

    async def _open(self) -> C:
        connection = await self._connect()
        self._opened.add(connection)
        return connection
