"""A Celery pool of threads, each with an event loop of its own.

It serves lane ``long``: methods that block, compute or take long. Unlike Celery's own threads pool it
enforces time limits, stops revoked jobs, and supports warm, soft and cold shutdown. Its threads have a lower
CPU priority than other processes on the machine. It is selected with
``CELERY_CUSTOM_WORKER_POOL=workers.pools.thread_pool:ThreadPool`` and ``--pool custom``."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import uvloop
from loguru import logger

from nekro.base.loop_thread import CANCEL_SECONDS, LoopThread, run_to_end
from nekro_agent.durations import CLOSE_STEP_SECONDS, RETRY_SECONDS
from workers.pools.base import JobPool, thread_state
from workers.pools.jobs import Alarms, PoolJob

__all__ = [
    "SessionShare",
    "ThreadPool",
    "lower_thread",
]


def lower_thread(niceness: int) -> None:
    """Lower the priority of this thread and of the threads that it starts later.

    The process keeps its priority: its other threads renew claims, and inits run in turns.
    """
    if niceness and sys.platform == "linux":  # elsewhere this call would lower the whole process
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)


class SessionShare:
    """Lowers this process's CPU share relative to other sessions while jobs run.

    With ``sched_autogroup_enabled`` Linux shares the CPU between sessions first and applies thread
    niceness only within each session. A worker is a session of its own, so lowering a thread alone would
    favour no other process. Within the session, threads that renew claims have priority over the jobs. While
    no job runs, the share is not lowered, so inits run at full share. Use it on the thread of ``loop`` only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        niceness: int,
        is_busy: Callable[[], bool],
        path: Path = Path("/proc/self/autogroup"),
        settle_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Create it with the full share.

        Args:
            path: the kernel's file for the niceness of the session.
            settle_seconds: delay between a change and its effect.
        """
        self._loop = loop
        self._niceness = niceness
        self._is_busy = is_busy
        self._path = path
        self._settle_seconds = settle_seconds
        self._now = 0
        self._timer: asyncio.TimerHandle | None = None
        # In a session shared with other processes, their share would be lowered too.
        self._is_possible = niceness > 0 and sys.platform == "linux" and os.getsid(0) == os.getpid()

    def changed(self) -> None:
        """Record that a job started or ended; the share is adjusted soon."""
        if self._is_possible and self._timer is None:
            self._timer = self._loop.call_later(self._settle_seconds, self._settle)

    def _settle(self) -> None:
        self._timer = None
        wanted = self._niceness if self._is_busy() else 0
        if wanted == self._now:
            return
        try:
            _write(self._path, str(wanted))
            self._now = wanted
        except BlockingIOError:  # the kernel accepts ten writes a second from all processes together
            self.changed()
        except OSError:  # the kernel has no autogroups, or they are not writable here
            self._is_possible = False


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


class ThreadPool(JobPool):
    """Runs up to ``limit`` jobs, one per thread; a separate loop thread enforces their time limits."""

    def on_start(self) -> None:
        """Start the threads."""
        self._queue: SimpleQueue[PoolJob | None] = SimpleQueue()
        self._clock = LoopThread("nekro-clock")
        self._alarms = Alarms(self._clock.loop, on_hard_limit=self._give_up)
        self._share = SessionShare(self._clock.loop, niceness=self.niceness(), is_busy=self._has_jobs)
        self._clock.start()
        self._threads: set[JobThread] = set()
        self._replacing = threading.Lock()
        for _ in range(self.limit):
            self._add_thread()

    def submit(self, job: PoolJob) -> None:
        """Queue a job for the next free thread."""
        self._queue.put(job)

    def drop_waiting(self) -> None:
        """Discard jobs that have not started."""
        while True:
            try:
                job = self._queue.get_nowait()
            except Empty:
                return
            if job is not None:
                self.ended(job)

    def close_loops(self) -> None:
        """Stop the threads; a blocked thread is abandoned and ends with the process."""
        for _ in range(len(self._threads)):
            self._queue.put(None)
        end = time.monotonic() + CLOSE_STEP_SECONDS
        for thread in list(self._threads):
            if not thread.is_retired:
                thread.join(max(0.0, end - time.monotonic()))
        self._clock.stop()

    def grow(self, n: int = 1) -> None:
        """Add threads."""
        self.limit += n
        for _ in range(n):
            self._add_thread()

    def shrink(self, n: int = 1) -> None:
        """Remove threads as they become free."""
        for _ in range(min(n, self.limit - 1)):
            self.limit -= 1
            self._queue.put(None)

    def _get_info(self) -> dict[str, Any]:
        retired = sum(thread.is_retired for thread in list(self._threads))
        return super()._get_info() | {"threads": len(self._threads), "blocked-threads": retired}

    def _add_thread(self) -> None:
        thread = JobThread(self)
        self._threads.add(thread)
        thread.start()

    # Called by the threads.

    def niceness(self) -> int:
        """How much the niceness of job threads is raised."""
        settings = getattr(self.app, "nekro_settings", None)
        return 0 if settings is None else int(settings.workers.long_nice)

    def next_job(self) -> PoolJob | None:
        """Wait for a job; None asks the thread to end."""
        return self._queue.get()

    def begin(self, job: PoolJob) -> None:
        """Record that a thread starts a job."""
        self._clock.call(self._alarms.arm, job)
        self._clock.call(self._share.changed)

    def finish(self, job: PoolJob) -> None:
        """Record that a thread has finished a job."""
        self._clock.call(self._alarms.disarm, job)
        self._clock.call(self._share.changed)
        self.ended(job)

    def _has_jobs(self) -> bool:
        return any(thread.job is not None for thread in list(self._threads))

    def left_work(self, thread: JobThread) -> None:
        """Replace a thread whose stopped job left coroutines: they end with the thread's loop.

        They would go on beside the thread's next jobs, and only while there is one.
        """
        if not self._is_stopped:  # then every loop ends
            self._replace(thread)

    def _replace(self, thread: JobThread) -> None:
        """Start another thread in place of one, which ends with its job."""
        with self._replacing:
            if thread.is_retired:
                return
            thread.is_retired = True
        logger.bind(thread=thread.name).warning("thread_replaced")
        self._add_thread()

    def gone(self, thread: JobThread) -> None:
        """Record that a thread has ended."""
        self._threads.discard(thread)

    def _give_up(self, job: PoolJob) -> None:
        """Abandon a job that passed its hard limit; replace its thread if that does not end soon."""
        self.ended(job)
        self._clock.loop.call_later(CANCEL_SECONDS, self._replace_thread, job)

    def _replace_thread(self, job: PoolJob) -> None:
        """Start another thread in place of a blocked one, which cannot be stopped."""
        for thread in list(self._threads):
            if thread.job is job:
                self._replace(thread)


class JobThread(threading.Thread):
    """A thread with an event loop of its own."""

    def __init__(self, pool: ThreadPool) -> None:
        # A daemon thread: a plugin that blocks for ever must not keep the process alive.
        super().__init__(name="nekro-long", daemon=True)
        self._pool = pool
        self.job: PoolJob | None = None
        #: Another thread has replaced it; it ends with its job.
        self.is_retired = False

    def run(self) -> None:
        """Run jobs until asked to end."""
        lower_thread(self._pool.niceness())
        loop = thread_state.loop = uvloop.new_event_loop()
        try:
            while not self.is_retired and (job := self._pool.next_job()) is not None:
                self._run(job, loop)
        finally:
            run_to_end(loop)
            self._pool.gone(self)

    def _run(self, job: PoolJob, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self._pool.begin(job)
        before = asyncio.all_tasks(loop)
        try:
            contextvars.Context().run(job.run)
        finally:
            if job.stop_reason is not None and asyncio.all_tasks(loop) - before:
                self._pool.left_work(self)
            self.job = None
            self._pool.finish(job)
