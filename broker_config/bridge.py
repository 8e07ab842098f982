"""The one way from Celery's synchronous code to coroutines on the loop that runs it.

The asyncio pool runs each task, Celery's tracer included, in a greenlet on its event loop.
Code in such a greenlet may wait for a coroutine with ``await_here``; the loop goes on with
other tasks meanwhile. Outside of one (a thread, the worker's main process) ``can_await`` is
False and callers take their blocking path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy.util import await_only, greenlet_spawn
from sqlalchemy.util.concurrency import in_greenlet

__all__ = ["at_loop_close", "await_here", "can_await", "close_loop_resources", "spawn"]

T = TypeVar("T")
P = ParamSpec("P")
Cleanup = Callable[[], Awaitable[None]]

#: How long all cleanups of one loop may take together.
CLEANUP_SECONDS: Final = 5

logger = logging.getLogger(__name__)
_cleanups: WeakKeyDictionary[asyncio.AbstractEventLoop, list[Cleanup]] = WeakKeyDictionary()


def spawn(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
    """Return a coroutine that runs a synchronous function in a greenlet of its own."""
    return greenlet_spawn(partial(function, *args, **kwargs))


def can_await() -> bool:
    """Whether the calling code runs in a greenlet that ``spawn`` started."""
    return in_greenlet()


def await_here(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable from synchronous code; only where ``can_await`` is True."""
    return await_only(awaitable)


def at_loop_close(cleanup: Cleanup) -> None:
    """Run ``cleanup`` on the running loop before its owner closes it; the newest runs first.

    For what belongs to one loop: connections, database engines.
    """
    _cleanups.setdefault(asyncio.get_running_loop(), []).append(cleanup)


async def close_loop_resources() -> None:
    """Run the cleanups of the running loop; one that fails is logged and stops none of the others."""
    cleanups = _cleanups.pop(asyncio.get_running_loop(), [])
    try:
        async with asyncio.timeout(CLEANUP_SECONDS):
            for cleanup in reversed(cleanups):
                try:
                    await cleanup()
                except Exception:  # a worker that stops must get to its end
                    logger.exception("cleanup of an event loop failed: %r", cleanup)
    except TimeoutError:
        logger.warning("cleanups of an event loop took longer than %s s; left behind", CLEANUP_SECONDS)
