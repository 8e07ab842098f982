"""Work that a cancellation must not leave half done: giving a connection back, ending a wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

__all__ = ["complete", "outlast"]

T = TypeVar("T")


async def complete(work: Awaitable[T], *, among: set[asyncio.Task[Any]] | None = None) -> T:
    """Wait for work until it has ended, however often the waiting task is cancelled meanwhile.

    ``asyncio.shield`` protects the work as well, but its caller goes on at once: what the caller does
    next then meets work that still runs.

    Args:
        work: a coroutine, or any awaitable that nothing else cancels. It must be bounded in time.
        among: holds the work's task while it runs, for code that has to wait for all such work.

    Raises:
        asyncio.CancelledError: the waiting task was cancelled; the work has ended by then.
        Exception: what the work raised.
    """
    task = asyncio.ensure_future(work)
    if among is not None:
        among.add(task)
        task.add_done_callback(among.discard)
    cancellation = await outlast(task)
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # retrieved: the cancellation is what the caller hears of
    raise cancellation


async def outlast(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until a future is done; returns the last cancellation that arrived meanwhile."""
    cancellation = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as exc:
            cancellation = exc
    return cancellation
