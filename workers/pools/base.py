"""The part of a Celery pool that is independent of where its jobs run.

In every pool the synchronous body of a Celery task runs plugin coroutines by ``awaiting``."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Final, TypeVar

from celery.concurrency.base import BasePool
from celery.concurrency.prefork import _run_ready_callbacks
from celery.exceptions import SoftTimeLimitExceeded
from kombu.asynchronous import get_event_loop
from loguru import logger

from nekro.base.greenlet_bridge import at_loop_close, await_here, can_await
from nekro.base.loop_thread import CANCEL_SECONDS
from nekro_agent.durations import POLL_SECONDS
from workers.pools.jobs import Cancellable, PoolJob, StopReason, TaskBody, aborted, current_job

__all__ = [
    "JobPool",
    "PoolJob",
    "StopReason",
    "at_loop_close",
    "current_job",
    "guarded",
    "run_async",
]


T = TypeVar("T")

#: ``.loop`` is the event loop of a thread of the ``long`` pool.
thread_state = threading.local()

#: ``with guarded():`` around synchronous plugin code; see ``TaskBody``.
guarded = TaskBody


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
        with TaskBody():
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


#: Shared keyword arguments of tracers: nearly no job has any, and they are only read.
_NO_NAMES: Final[dict[str, Any]] = {}


class JobPool(BasePool):  # type: ignore[misc]
    """Tracks its jobs, stops one or all of them, and implements warm, soft and cold shutdown.

    A warm shutdown waits for running jobs for ``NEKRO_WORKERS__DRAIN_SECONDS``, then stops the
    remaining ones; their messages stay unacknowledged and return to their queue.
    """

    limit: int
    signal_safe = False
    body_can_be_buffer = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._jobs: dict[int, PoolJob] = {}
        self._ended = threading.Event()
        self._is_stopped = False

    # Implemented by a concrete pool.

    def submit(self, job: PoolJob) -> None:
        """Run a job as soon as a slot is free."""
        raise NotImplementedError

    def drop_waiting(self) -> None:
        """Discard jobs that have not started; their messages return to their queue."""
        raise NotImplementedError

    def close_loops(self) -> None:
        """Stop the event loops and their threads."""
        raise NotImplementedError

    # Called by Celery.

    def start(self) -> None:
        """Start the pool, without Celery's debug log of jobs, which would show their arguments."""
        super().start()
        self._does_debug = False

    def on_apply(self, target: Any, args: Any = None, kwargs: Any = None, **options: Any) -> PoolJob:
        """Accept a delivery."""
        job = PoolJob(
            target=target,
            args=args or (),
            kwargs=kwargs or _NO_NAMES,
            callback=options.get("callback") or _ignore,
            accept_callback=options.get("accept_callback"),
            error_callback=options.get("error_callback"),
            timeout_callback=options.get("timeout_callback"),
            soft_limit_seconds=options.get("soft_timeout") or self.options.get("soft_timeout"),
            hard_limit_seconds=options.get("timeout") or self.options.get("timeout"),
        )
        self._jobs[job.pid] = job
        self.submit(job)
        return job

    def terminate_job(self, pid: int, signal: object = None) -> None:
        """Stop a job; no effect for an unknown number, whose job has ended."""
        job = self._jobs.get(pid)
        if job is not None:
            job.stop(StopReason.TERMINATED)

    def on_stop(self) -> None:
        """Warm or soft shutdown; also the second half of a cold one, after Celery has stopped its jobs."""
        self._shut_down(seconds=self._drain_seconds())

    def on_terminate(self) -> None:
        """Cold shutdown."""
        self._shut_down(seconds=0)

    def flush(self) -> None:
        """Drop jobs that have not started: the connection is lost and their messages return to the queue."""
        for job in self._running():
            if job.request is None or not job.request.server:  # the other servers are still connected
                job.drop()

    def running_ids(self) -> set[str]:
        """Ids of the tasks that have started and not ended; thread-safe."""
        return {job.task_id for job in self._running() if job.has_begun}

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        return info | {
            "max-concurrency": self.limit,
            "jobs": len(self._jobs),
            "timeouts": [self.options.get("soft_timeout") or 0, self.options.get("timeout") or 0],
        }

    # Called by jobs.

    def ended(self, job: PoolJob) -> None:
        """Record that a job is over, or abandoned at its hard limit."""
        self._jobs.pop(job.pid, None)
        self._ended.set()

    def _drain_seconds(self) -> float:
        settings = getattr(self.app, "nekro_settings", None)
        return float("inf") if settings is None else float(settings.workers.drain_seconds)

    def _shut_down(self, *, seconds: float) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self.drop_waiting()
        self._wait(lambda: any(job.stop_reason is None for job in self._running()), seconds=seconds)
        left = self._running()
        for job in left:
            job.stop(StopReason.TERMINATED)
        if left:
            logger.bind(count=len(left)).warning("jobs_stopped")
            self._wait(lambda: bool(self._jobs), seconds=CANCEL_SECONDS)
        self.close_loops()
        _let_acknowledgements_through()

    def _running(self) -> list[PoolJob]:
        return list(self._jobs.values())

    def _wait(self, is_needed: Any, *, seconds: float) -> None:
        end = time.monotonic() + seconds
        while is_needed() and time.monotonic() < end:
            self._ended.wait(POLL_SECONDS)
            self._ended.clear()
            _let_acknowledgements_through()


def _let_acknowledgements_through() -> None:
    """Run the callbacks that jobs scheduled on the worker's hub, whose thread is waiting here for the jobs.

    Without this an acknowledgement would wait until the pool has drained, and a kill meanwhile
    would cause finished tasks to be delivered again.
    """
    hub = get_event_loop()
    if hub is None:
        return
    try:
        hub.fire_timers()
        _run_ready_callbacks(hub)
    except Exception:  # the shutdown must continue; unacknowledged messages are delivered again
        logger.opt(exception=True).warning("acknowledgements_failed")


def _ignore(_: Any) -> None:
    """Replace a missing callback."""
