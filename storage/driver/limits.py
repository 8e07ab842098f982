"""Time limits for waits and transactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from nekro_agent.errors import StorageUnavailableError

__all__ = ["acquire", "limited", "took_too_long"]

#: How much later than its connection a transaction's task is stopped, so that the driver's error comes first.
_GRACE_SECONDS: Final = 1.0


@asynccontextmanager
async def limited(seconds: float) -> AsyncIterator[None]:
    """Stop a block that waits for something other than its connection, which has its own time limit.

    Raises:
        StorageUnavailableError: the block took longer than ``seconds`` and a grace period.
    """
    try:
        async with asyncio.timeout(seconds + _GRACE_SECONDS) as limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        raise took_too_long(seconds) from exc


def took_too_long(seconds: float) -> StorageUnavailableError:
    """Return the error for a transaction that exceeded its time limit."""
    return StorageUnavailableError(
        f"a transaction took longer than {seconds} s (NEKRO_DATABASE__TRANSACTION_TIMEOUT_SECONDS)"
    )


async def acquire(
    gate: asyncio.Lock | asyncio.Semaphore, seconds: float, error: Callable[[], StorageUnavailableError]
) -> None:
    """Acquire a lock or semaphore within ``seconds``; raises what ``error`` returns when that fails."""
    if not gate.locked():
        await gate.acquire()
        return
    try:
        async with asyncio.timeout(seconds):
            await gate.acquire()
    except TimeoutError as exc:
        raise error() from exc
