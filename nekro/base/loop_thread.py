"""An event loop on a thread of its own, which ends within a time limit whatever runs on it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final

import uvloop
from loguru import logger

from nekro.base.greenlet_bridge import close_loop_resources, seconds_to_close

__all__ = ["CANCEL_SECONDS", "LoopThread", "run_to_end", "this_task"]

#: How long a cancelled coroutine may take to end before its loop, or its thread, is abandoned.
CANCEL_SECONDS: Final = 2


class LoopThread:
    """A daemon thread that runs one event loop until ``stop``."""

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_here(self) -> bool:
        """Whether the calling code runs on this thread."""
        return threading.get_ident() == self._thread.ident

    def call(self, function: Callable[..., None], *args: Any) -> None:
        """Schedule a function on the loop; ignored when the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """Cancel what runs, clean up and end the thread.

        A coroutine that does not end is abandoned. So is the thread: at once if its loop is blocked, and
        after the time of all cleanups if a cleanup blocks it.
        """
        if not self._thread.is_alive():
            return
        seconds = seconds_to_close(self.loop) + 2 * CANCEL_SECONDS
        self.call(self.loop.stop)
        if self._has_stopped.wait(3 * CANCEL_SECONDS):
            self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self._has_stopped.set()
        run_to_end(self.loop)


def run_to_end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel a stopped loop's tasks, run its cleanups and close it."""

    async def finish() -> None:
        tasks: set[asyncio.Task[Any]] = asyncio.all_tasks() - {this_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            _, stubborn = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
            if stubborn:
                logger.bind(count=len(stubborn)).warning("coroutines_abandoned")
        await close_loop_resources()
        await loop.shutdown_asyncgens()

    _finish(loop, finish())


def this_task() -> asyncio.Task[Any]:
    """Return the task of the calling coroutine."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - called from a coroutine
    return task


def _finish(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        loop.run_until_complete(coroutine)
    except Exception:  # the process ends, and with it everything on the loop
        logger.exception("event_loop_not_closed")
    finally:
        loop.close()
