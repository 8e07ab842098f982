"""Shared by all loops that renew leases or poll for work: they survive errors and report losses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from loguru import logger

from nekro_agent.errors import NekroError
from runtime.metrics import metrics
from workers.pools.background import BackgroundLoop

__all__ = ["Poll", "report_loss", "survived"]


@contextmanager
def survived(event: str, **fields: object) -> Iterator[None]:
    """Log an error of the block and continue: the loop must not end, and its next attempt may succeed.

    Args:
        event: name of the log event.
    """
    try:
        yield
    except NekroError as exc:  # such as a database that does not answer
        logger.bind(error=str(exc), **fields).warning(event)
    except Exception:  # the loop has no caller that would see the error
        logger.bind(**fields).exception(event)


def report_loss(lease: str, **fields: object) -> None:
    """Count and log a lease that passed to another process while this process used it.

    Args:
        lease: its kind, as in the metric ``nekro_leases_lost_total``.
    """
    metrics().leases_lost.labels(lease).inc()
    logger.bind(lease=lease, **fields).error("lease_lost")


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
            with survived(self._on_error):
                await self._step()

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_running = self._is_needed()
            return self._is_running
