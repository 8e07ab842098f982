"""Steps that are repeated on the background loop while there is work for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

from nekro.app.background import BackgroundLoop
from nekro.base.tasks import log_errors

__all__ = ["Poll"]


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
