"""Tasks that belong to an object: repeated steps, their errors, their end, and uncancelled work.

``complete`` runs work to completion despite cancellation, such as returning a connection to its pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn, TypeVar

from loguru import logger

from nekro_agent.errors import NekroError

__all__ = [
    "OwnedTasks",
    "clean_up_timeout",
    "complete",
    "end_tasks",
    "log_errors",
    "outlast",
    "repeat",
]

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


@contextmanager
def log_errors(event: str, **fields: object) -> Iterator[None]:
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


class OwnedTasks:
    """Tasks of one owner, which ends them together; used on one event loop."""

    def __init__(self, name: str) -> None:
        """``name`` is that of each task, for debugging."""
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside its caller."""
        task = asyncio.create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel what runs, and wait until it has ended."""
        await end_tasks(*self._tasks)


async def end_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise; None is no task."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def clean_up_timeout(seconds: float) -> AsyncGenerator[asyncio.Timeout]:
    """Limit a step of clean-up: ``asyncio.timeout`` that also works in a task that is being cancelled.

    Before CPython 3.11.4, ``asyncio.timeout`` raises CancelledError there instead of TimeoutError, which ends
    the clean-up. Another cancellation within the step is raised on every version.
    """
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - this is a coroutine
    cancelled = task.cancelling()
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except asyncio.CancelledError as exc:
        if limit.expired() and task.cancelling() <= cancelled:
            raise TimeoutError from exc
        raise


async def repeat(step: Callable[[], Awaitable[object]], *, seconds: float, on_error: str) -> NoReturn:
    """Repeat a step until this task is cancelled.

    Args:
        seconds: pause before each step.
        on_error: name of the log event of a step that failed; the next one is tried all the same.
    """
    while True:
        await asyncio.sleep(seconds)
        with log_errors(on_error):
            await step()
