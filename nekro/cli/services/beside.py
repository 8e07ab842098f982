"""An event loop beside the main thread, for a command whose main thread reads a terminal.

Ctrl-C then interrupts the main thread only: what runs on the loop continues until it is cancelled.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Generic, NoReturn, TypeVar

from nekro.cli.running import TerminatedError

__all__ = ["BackgroundContext", "opened_in_background"]

T = TypeVar("T")
V = TypeVar("V")


class BackgroundContext(Generic[V]):
    """What was opened on the loop; made by ``opened_in_background``."""

    def __init__(self, value: V, loop: asyncio.AbstractEventLoop) -> None:
        self.value = value
        self._loop = loop

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop; ``result`` of the future can be interrupted and called again."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work on the loop; an interruption cancels it."""
        begun = self.begin(work)
        try:
            return begun.result()
        except BaseException:
            begun.cancel()
            raise


@contextmanager
def opened_in_background(opening: AbstractAsyncContextManager[V]) -> Iterator[BackgroundContext[V]]:
    """Keep a context open on an event loop in a thread; both end with the block.

    Raises:
        TerminatedError: SIGTERM, while the block runs.
        Exception: the context cannot be opened or closed.
    """
    opened: Future[BackgroundContext[V]] = Future()
    ended: Future[None] = Future()
    holder: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []
    closing = threading.Event()

    async def hold() -> None:
        loop = asyncio.get_running_loop()
        holder.append((loop, asyncio.current_task()))
        async with opening as value:
            opened.set_result(BackgroundContext(value, loop))
            await asyncio.to_thread(closing.wait)

    def main() -> None:
        try:
            asyncio.run(hold())
        except BaseException as exc:
            # An error of the opening belongs to the block's start, a later one to its end.
            (ended if opened.done() else opened).set_exception(exc)
        if not ended.done():
            ended.set_result(None)

    thread = threading.Thread(target=main, name="nekro-beside", daemon=True)
    before = signal.signal(signal.SIGTERM, _terminate)
    thread.start()
    try:
        yield opened.result()
    finally:
        closing.set()
        if not opened.done() and holder and holder[0][1] is not None:
            holder[0][0].call_soon_threadsafe(holder[0][1].cancel)
        ended.result()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def _terminate(*_: object) -> NoReturn:
    raise TerminatedError
