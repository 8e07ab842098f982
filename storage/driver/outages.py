"""Repeats what plugins ask of the database while it does not answer for a short time."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from nekro_agent.durations import GRACE_SECONDS, RETRY_SECONDS
from nekro_agent.errors import StorageUnavailableError

__all__ = ["outlasting"]

P = ParamSpec("P")
T = TypeVar("T")


def outlasting(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Repeat an asynchronous function during a short outage of the database.

    The function must be idempotent: it may have been committed although it raised. What it wrote then, it
    finds at the next attempt, so ``set`` of a new key may say that a value was replaced.

    Raises:
        StorageUnavailableError: the outage was longer than a restart or a failover takes.
    """

    @functools.wraps(function)
    async def repeated(*args: P.args, **kwargs: P.kwargs) -> T:
        give_up_at = time.monotonic() + 3 * GRACE_SECONDS
        while True:
            try:
                return await function(*args, **kwargs)
            except StorageUnavailableError:
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    return repeated
