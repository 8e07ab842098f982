"""A Celery pool that runs hundreds of waiting tasks concurrently on one event loop in one thread.

It is selected with Celery's options for out-of-tree pools:
``CELERY_CUSTOM_WORKER_POOL=workers.pools.asyncio_pool:AsyncioPool`` and ``--pool custom``.

Each task is a greenlet on a uvloop thread. Celery's tracer runs in it unmodified, and
Celery's task-local state (``current_task`` and the like) is keyed by greenlet. Successful method
calls need neither; see ``workers.pools.fast_path``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from workers.pools.base import JobPool
from workers.pools.fast_path import run_job
from workers.pools.jobs import Alarms, Job, LoopThread

__all__ = ["AsyncioPool"]


class AsyncioPool(JobPool):
    """Runs up to ``limit`` jobs on one loop; the attributes with ``_`` belong to the loop's thread."""

    def on_start(self) -> None:
        """Start the loop's thread."""
        self._tasks = self.app.tasks
        self._waiting: deque[Job] = deque()
        self._running_jobs: dict[Job, asyncio.Task[None]] = {}
        #: Tasks of jobs that were abandoned at their hard limit and still run.
        self._stubborn: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("nekro-pool")
        self._alarms = Alarms(self._thread.loop, on_hard_limit=self._give_up)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs the jobs; its owner closes it."""
        return self._thread.loop

    def submit(self, job: Job) -> None:
        """Queue a job on the loop."""
        if self._thread.is_here():
            self._admit(job)
        else:
            self._thread.call(self._admit, job)

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

    def _admit(self, job: Job) -> None:
        self._waiting.append(job)
        self._start_waiting()

    def _start_waiting(self) -> None:
        # Prefetching respects the limit; tasks with a countdown or with early
        # acknowledgement can exceed it.
        while self._waiting and len(self._running_jobs) < self.limit:
            job = self._waiting.popleft()
            self._running_jobs[job] = self._thread.loop.create_task(self._run(job))

    def _forget_waiting(self) -> None:
        while self._waiting:
            self.ended(self._waiting.popleft())

    async def _run(self, job: Job) -> None:
        self._alarms.arm(job)
        try:
            await run_job(job, self._tasks)
        finally:
            self._alarms.disarm(job)
            self._release(job)

    def _give_up(self, job: Job) -> None:
        """Free the slot of a job that passed its hard limit, whether or not its coroutine ends."""
        task = self._running_jobs.get(job)
        if task is not None:
            self._stubborn.add(task)
            task.add_done_callback(self._stubborn.discard)
        self._release(job)

    def _release(self, job: Job) -> None:
        if self._running_jobs.pop(job, None) is not None:
            self.ended(job)
            self._start_waiting()
