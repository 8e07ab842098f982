"""Tasks that belong to an object: repeated steps, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from nekro.base.error_logging import log_errors

__all__ = ["OwnedTasks", "clean_up_timeout", "end_tasks", "repeat"]


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
