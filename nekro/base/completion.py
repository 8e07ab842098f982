"""Runs work to completion despite cancellation, such as returning a connection to its pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

__all__ = ["complete", "outlast"]

T = TypeVar("T")


async def complete(work: Awaitable[T]) -> T:
    """Wait until work has ended, even if the waiting task is cancelled repeatedly meanwhile.

    ``asyncio.shield`` protects the work too, but its caller resumes immediately, while the work may still
    be running.

    Args:
        work: a coroutine, or any awaitable that nothing else cancels. It must be bounded in time.

    Raises:
        asyncio.CancelledError: the waiting task was cancelled; the work has ended.
        Exception: the error of the work.
    """
    task = asyncio.ensure_future(work)
    cancellation = await outlast(task)
    if cancellation is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # marked as retrieved; the caller gets the cancellation
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
