"""Bounded waits of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from nekro_agent.errors import StorageUnavailableError

__all__ = ["acquire", "limited", "took_too_long"]

#: How much later than its connection a transaction's own task is stopped.
_GRACE_SECONDS: Final = 1.0


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """Stop a block that outlives the cut of its connection, because it waits for something else.

    Raises:
        StorageUnavailableError: it did.
    """
    try:
        async with asyncio.timeout(seconds + _GRACE_SECONDS) as limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise took_too_long(seconds) from exc


def took_too_long(seconds: float) -> StorageUnavailableError:
    """Return what is raised when a transaction is not over in time."""
    return StorageUnavailableError(
        f"a transaction took longer than {seconds} s (NEKRO_DATABASE__TRANSACTION_TIMEOUT_SECONDS)"
    )


async def acquire(
    gate: asyncio.Lock | asyncio.Semaphore, seconds: float, error: Callable[[], StorageUnavailableError]
) -> None:
    """Take a place at a gate; ``error`` makes what is raised when none is free in time."""
    if not gate.locked():
        await gate.acquire()
        return
    try:
        async with asyncio.timeout(seconds):
            await gate.acquire()
    except TimeoutError as exc:
        raise error() from exc
