"""An event loop on a thread of its own, for work that must continue whatever plugin code does.

Claims of jobs are renewed here, so a job that blocks its own thread keeps its claim. Synchronous
functions of the plugin API run their database access here, each with a time limit. Steps that are repeated
while there is work for them are polls of this loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

from loguru import logger

from nekro.base.greenlet_bridge import at_loop_close
from nekro.base.loop_thread import LoopThread
from nekro.base.tasks import log_errors
from nekro_agent.durations import CLOSE_STEP_SECONDS, PROGRAM_SECONDS
from nekro_agent.errors import StorageUnavailableError
from storage.engine import Database

__all__ = [
    "BackgroundLoop",
    "Poll",
]


T = TypeVar("T")


class BackgroundLoop:
    """A loop on a thread of its own, started at first use; its database connections end with it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._is_closed = False
        self._unsettled: set[futures.Future[Any]] = set()

    def submit(self, work: Coroutine[Any, Any, T]) -> futures.Future[T]:
        """Start a coroutine on the loop.

        Raises:
            RuntimeError: the loop was closed.
        """
        try:
            loop = self._running_loop()
        except RuntimeError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, loop)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the background loop and await it on the caller's loop."""
        return await asyncio.wrap_future(self.submit(work))

    def answer(self, work: Coroutine[Any, Any, T], *, seconds: float) -> T:
        """Run a coroutine on the loop and block the calling thread until it is done.

        Raises:
            RuntimeError: the calling thread is that of the loop, which would wait for itself.
            StorageUnavailableError: it took longer than ``seconds``; the coroutine is cancelled.
        """
        if self._thread is not None and asyncio._get_running_loop() is self._thread.loop:
            work.close()
            raise RuntimeError("code on the background loop awaits its work instead of blocking for it")
        future = self.submit(work)
        try:
            return future.result(seconds)
        except (TimeoutError, futures.CancelledError) as exc:
            if future.done() and not future.cancelled():
                raise  # the coroutine's own error
            future.cancel()
            raise StorageUnavailableError(f"the database did not answer within {seconds} s") from exc

    def settle(self, work: Coroutine[Any, Any, object], *, seconds: float) -> bool:
        """Run a write on the loop and wait up to ``seconds``; False if it continues in the background.

        The write may wait for a transaction of the loop whose thread the caller blocks, and that
        transaction continues only when the caller returns.
        """
        future = self.submit(work)
        with self._lock:
            self._unsettled.add(future)
        future.add_done_callback(self._settled)
        try:
            future.result(seconds)
        except TimeoutError:
            if not future.done():
                return False
            raise
        return True

    def close(self) -> None:
        """Stop the loop after the writes left to it are done; blocks for a few seconds at most."""
        with self._lock:
            self._is_closed = True
            thread, self._thread = self._thread, None
            unsettled = list(self._unsettled)
        if thread is None:
            return
        futures.wait(unsettled, timeout=CLOSE_STEP_SECONDS)
        thread.stop()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the background loop of this process was closed")
            if self._thread is None:
                thread = LoopThread("nekro-background")
                thread.start()
                asyncio.run_coroutine_threadsafe(self._prepare(), thread.loop).result(PROGRAM_SECONDS)
                self._thread = thread
            return self._thread.loop

    async def _prepare(self) -> None:
        at_loop_close(self._database.dispose_loop)

    def _settled(self, future: futures.Future[Any]) -> None:
        with self._lock:
            self._unsettled.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.bind(error=str(error), error_type=type(error).__name__).warning("background_write_failed")


class Poll:
    """Repeats a step on the background loop while it is needed."""

    def __init__(
        self,
        background: BackgroundLoop,
        step: Callable[[], Awaitable[None]],
        *,
        seconds: float,
        is_needed: Callable[[], bool],
        on_error: str,
    ) -> None:
        """Create the poll; it does not run yet.

        Args:
            seconds: pause before each step.
            is_needed: whether another step is needed; called with a lock held.
            on_error: name of the log event of a step that failed.
        """
        self._background = background
        self._step = step
        self._seconds = seconds
        self._is_needed = is_needed
        self._on_error = on_error
        self._lock = threading.Lock()
        self._is_running = False

    def start(self) -> None:
        """Start to poll unless it is running; call it after adding work. Thread-safe.

        Raises:
            RuntimeError: the background loop was closed.
        """
        with self._lock:
            begins, self._is_running = not self._is_running, True
        if begins:
            self._background.submit(self._run())

    async def _run(self) -> None:
        while self._goes_on():
            await asyncio.sleep(self._seconds)
            with log_errors(self._on_error):
                await self._step()

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_running = self._is_needed()
            return self._is_running
