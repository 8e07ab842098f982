"""A Celery pool that runs hundreds of waiting tasks concurrently on one event loop in one thread.

It is selected with Celery's options for out-of-tree pools:
``CELERY_CUSTOM_WORKER_POOL=workers.pools.asyncio_pool:AsyncioPool`` and ``--pool custom``.

Celery's tracer is synchronous, so each task that it runs is a greenlet on the uvloop thread; Celery's
task-local state (``current_task`` and the like) is keyed by greenlet. The tracer supports chains, chords
and retries, which admitted messages never use. So a call that succeeds runs as a coroutine, without the
tracer and without a greenlet's stack: the fast path. Every end other than success, in the method or in
Redis, is passed to the tracer with the outcome so far: Celery alone handles failures, stops, duplicates
and results that cannot be stored, and the method never runs a second time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from celery import signals
from celery.exceptions import SoftTimeLimitExceeded

from nekro.base.greenlet_bridge import spawn
from nekro.base.loop_thread import LoopThread
from nekro.broker.celery.result_backend import ReplyBackend
from nekro.broker.celery.tasks import PrivateRequest
from workers.pools.base import JobPool
from workers.pools.jobs import Alarms, BodyOutcome, Interruptible, PoolJob, StopReason, TaskBody, aborted
from workers.pools.observation import begin_observation, is_only_observer

__all__ = ["FAST_BODY", "AsyncioPool"]

Body = Callable[..., Awaitable[Any]]

#: Attribute of a Celery task: a function that returns an awaitable of the body's result as JSON data.
FAST_BODY: Final = "nekro_fast_body"


class AsyncioPool(JobPool):
    """Runs up to ``limit`` jobs on one loop; the attributes with ``_`` belong to the loop's thread."""

    def on_start(self) -> None:
        """Start the loop's thread."""
        self._tasks = self.app.tasks
        self._waiting: deque[PoolJob] = deque()
        self._running_jobs: dict[PoolJob, asyncio.Task[None]] = {}
        #: Tasks of jobs that were abandoned at their hard limit and still run.
        self._stubborn: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("nekro-pool")
        self._alarms = Alarms(self._thread.loop, on_hard_limit=self._give_up)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs the jobs; its owner closes it."""
        return self._thread.loop

    def submit(self, job: PoolJob) -> None:
        """Queue a job on the loop."""
        if not self._thread.is_here():
            self._thread.call(self.submit, job)
            return
        self._waiting.append(job)
        self._start_waiting()

    def drop_waiting(self) -> None:
        """Discard jobs that have not started."""
        self._thread.call(self._forget_waiting)

    def close_loops(self) -> None:
        """Stop the loop."""
        self._thread.stop()

    def grow(self, n: int = 1) -> None:
        """Raise the number of concurrent jobs."""
        self.limit += n
        self._thread.call(self._start_waiting)

    def shrink(self, n: int = 1) -> None:
        """Lower the number of concurrent jobs; running jobs are not affected."""
        self.limit = max(1, self.limit - n)

    def _get_info(self) -> dict[str, Any]:
        return super()._get_info() | {"running": len(self._running_jobs), "waiting": len(self._waiting)}

    def _start_waiting(self) -> None:
        # Prefetching respects the limit; tasks with a countdown or with early
        # acknowledgement can exceed it.
        while self._waiting and len(self._running_jobs) < self.limit:
            job = self._waiting.popleft()
            self._running_jobs[job] = self._thread.loop.create_task(self._run(job))

    def _forget_waiting(self) -> None:
        while self._waiting:
            self.ended(self._waiting.popleft())

    async def _run(self, job: PoolJob) -> None:
        """Run a delivery to its end: result stored, message acknowledged."""
        self._alarms.arm(job)
        try:
            task = self._tasks.get(job.args[0])
            body: Body | None = getattr(task, FAST_BODY, None)
            request = job.request
            if body is None or request is None or not _is_plain(task, request):
                await spawn(job.run)
            elif job.begin():
                await _run_fast(job, body, task, request)
        finally:
            self._alarms.disarm(job)
            self._release(job)

    def _give_up(self, job: PoolJob) -> None:
        """Free the slot of a job that passed its hard limit, whether or not its coroutine ends."""
        task = self._running_jobs.get(job)
        if task is not None:
            self._stubborn.add(task)
            task.add_done_callback(self._stubborn.discard)
        self._release(job)

    def _release(self, job: PoolJob) -> None:
        if self._running_jobs.pop(job, None) is not None:
            self.ended(job)
            self._start_waiting()


def _is_plain(task: Any, request: PrivateRequest) -> bool:
    """Whether nothing but the end of a task requires the tracer."""
    has_result = not (task.ignore_result or request.ignore_result)
    return has_result and is_only_observer() and not signals.task_success.receivers


async def _run_fast(job: PoolJob, body: Body, task: Any, request: PrivateRequest) -> None:
    try:
        began = time.monotonic()
        if job.accept_callback is not None:
            job.accept_callback(job.pid, began)
        observation = job.observation = begin_observation(
            task.name, request.id, request.args, request.request_dict
        )
        job.outcome = outcome = await _outcome(job, body, request)
        if outcome.error is None and await _is_stored(task.backend, request, outcome.value):
            observation.end("ok")
            job.succeed(request.shown(outcome.value), time.monotonic() - began)
        else:
            await spawn(lambda: job.trace(accept=None))
    except Exception as exc:  # edge of the pool: the slot must be freed whatever happened
        job.escape(exc)


async def _outcome(job: PoolJob, body: Body, request: PrivateRequest) -> BodyOutcome:
    guard = Interruptible()
    try:
        with TaskBody():
            try:
                with guard:
                    work = body(*request.args)
                    _drop_arguments(job, request)
                    return BodyOutcome(value=await work)
            except asyncio.CancelledError as exc:
                if guard.was_interrupted and job.stop_reason is StopReason.SOFT_LIMIT:
                    raise SoftTimeLimitExceeded(job.soft_limit_seconds) from exc
                if _is_loop_closing():
                    raise
                raise aborted(exc) from exc
    except Exception as exc:
        return BodyOutcome(error=exc)


def _drop_arguments(job: PoolJob, request: PrivateRequest) -> None:
    """Drop a job's copies of its arguments when its body has them: thousands of calls may wait."""
    request.release_body()
    name, task_id, headers, _, *encoding = job.args
    job.args = (name, task_id, headers, request.body, *encoding)


def _is_loop_closing() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _is_stored(backend: Any, request: PrivateRequest, value: Any) -> bool:
    """Store a result and end its delivery; False if Celery must."""
    if not isinstance(backend, ReplyBackend):
        return False
    ending = request.ending
    is_stored = False
    try:
        is_stored = await backend.at(request.server).store_success(
            request.id, value, reply_to=request.reply_to, ending=ending
        )
    finally:
        if ending is not None:
            ending.end(is_stored)
    return is_stored
