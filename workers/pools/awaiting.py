"""Runs plugin coroutines from the synchronous body of a Celery task, in every pool."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

from celery.exceptions import SoftTimeLimitExceeded

from nekro.base.greenlet_bridge import at_loop_close, await_here, can_await
from workers.pools.jobs import Body, Cancellable, Job, StopReason, aborted, current_job

__all__ = ["Job", "StopReason", "at_loop_close", "current_job", "guarded", "run_async"]

T = TypeVar("T")

#: ``.loop`` is the event loop of a thread of the ``long`` pool.
thread_state = threading.local()

#: ``with guarded():`` around synchronous plugin code; see ``Body``.
guarded = Body


def run_async(awaitable: Awaitable[T]) -> T:
    """Run a coroutine from a task's body and return its value.

    In the asyncio pool other tasks continue meanwhile. In the thread pool the coroutine runs on
    the thread's own loop, and under Celery's other pools on a loop created for it.

    Raises:
        SoftTimeLimitExceeded: the job's soft time limit passed and the coroutine was cancelled.
        MethodAbortedError: the coroutine ended in a ``BaseException``; a cancellation that it raised
            itself counts as one.
        JobStopped: the job was revoked, passed its hard limit or lost its worker; do not catch it.
        RuntimeError: called from a coroutine; use ``await`` there.
    """
    try:
        with Body():
            return _run(awaitable)
    finally:
        if isinstance(awaitable, Coroutine):
            awaitable.close()  # needed if it never started; no effect after its end


def _run(awaitable: Awaitable[T]) -> T:
    if can_await():
        return await_here(_supervised(awaitable))
    if _is_loop_running():
        raise RuntimeError("run_async was called from a coroutine; use await there instead")
    loop: asyncio.AbstractEventLoop | None = getattr(thread_state, "loop", None)
    if loop is None:
        return asyncio.run(_supervised(awaitable))
    return loop.run_until_complete(_supervised(awaitable))


async def _supervised(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable as a task of its own, so that the job can cancel only this task."""
    task: asyncio.Task[T] = asyncio.ensure_future(_contained(awaitable))
    job = current_job()
    try:
        with Cancellable(task):
            return await task
    except asyncio.CancelledError as exc:
        if not task.cancelled():
            raise  # the loop itself is closing
        if job is not None and job.stop_reason is StopReason.SOFT_LIMIT:
            raise SoftTimeLimitExceeded(job.soft_limit_seconds) from exc
        raise aborted(exc) from exc


async def _contained(awaitable: Awaitable[T]) -> T:
    """Convert a ``BaseException`` to an ordinary error: some of them would end the event loop."""
    try:
        return await awaitable
    except asyncio.CancelledError:
        raise
    except BaseException as exc:
        if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
            raise
        raise aborted(exc) from exc


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
