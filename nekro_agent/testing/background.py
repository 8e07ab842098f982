"""Timers that a test fires, and background jobs as asyncio tasks of the test's loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from nekro_agent.errors import ConflictError
from nekro_agent.execution.current import Payer, paying
from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, TaskSignal, drive
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import CronJob, JobInfo, JobRequest, JobState, TimerInfo
from nekro_agent.testing.memory import InMemoryMessages

__all__ = [
    "InMemoryCronJobs",
    "InMemoryJobs",
    "InMemoryTimers",
]


class InMemoryTimers:
    """Implements ``Timers``."""

    def __init__(self, messages: InMemoryMessages) -> None:
        self._messages = messages
        self._timers: dict[str, TimerInfo] = {}
        self._count = 0

    async def add(self, chat_key: str, *, fire_at: datetime, description: str, temporary: bool) -> TimerInfo:
        """Add a timer."""
        if temporary:
            await self.clear(chat_key, temporary=True)
        self._count += 1
        timer = TimerInfo(
            id=f"t{self._count}",
            chat_key=chat_key,
            fire_at=fire_at,
            description=description,
            temporary=temporary,
        )
        self._timers[timer.id] = timer
        return timer

    async def clear(self, chat_key: str, *, temporary: bool | None = None) -> int:
        """Cancel timers; returns their number."""
        gone = [t.id for t in await self.pending(chat_key) if temporary in (None, t.temporary)]
        for timer_id in gone:
            del self._timers[timer_id]
        return len(gone)

    async def delete(self, timer_id: str) -> bool:
        """Cancel one timer; False if there is none."""
        return self._timers.pop(timer_id, None) is not None

    async def pending(self, chat_key: str) -> list[TimerInfo]:
        """Return the chat's timers, soonest first."""
        own = [timer for timer in self._timers.values() if timer.chat_key == chat_key]
        return sorted(own, key=lambda timer: timer.fire_at)

    async def fire_due(self, now: datetime) -> int:
        """Fire timers that are due at ``now``; returns their number."""
        due = sorted((t for t in self._timers.values() if t.fire_at <= now), key=lambda t: t.fire_at)
        for timer in due:
            del self._timers[timer.id]
            await self._messages.push_system(
                timer.chat_key, timer.description, trigger_agent=True, call_id=None
            )
        return len(due)


class InMemoryCronJobs:
    """Implements ``CronJobs``."""

    def __init__(self, messages: InMemoryMessages) -> None:
        self._messages = messages
        self._jobs: dict[str, CronJob] = {}

    async def add(self, job: CronJob) -> bool:
        """Add a job; False if the id is taken."""
        return self._jobs.setdefault(job.job_id, job) is job

    async def get(self, job_id: str) -> CronJob | None:
        """Return a job, or None."""
        return self._jobs.get(job_id)

    async def replace(self, job: CronJob) -> bool:
        """Replace a job's values."""
        old = self._jobs.get(job.job_id)
        if old is None:
            return False
        self._jobs[job.job_id] = dataclasses.replace(
            job, last_fired_at=old.last_fired_at, created_at=old.created_at
        )
        return True

    async def delete(self, job_id: str) -> bool:
        """Delete a job; True if there was one."""
        return self._jobs.pop(job_id, None) is not None

    async def of_chat(self, chat_key: str | None) -> list[CronJob]:
        """Return the jobs of a chat, or of all chats if it is None, oldest first."""
        return [job for job in self._jobs.values() if chat_key in (None, job.chat_key)]

    async def run_now(self, job_id: str) -> bool:
        """Fire once."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        await self._messages.push_system(job.chat_key, job.event_desc, trigger_agent=True, call_id=None)
        return True


_FINAL = {
    TaskSignal.SUCCESS: JobState.SUCCEEDED,
    TaskSignal.FAIL: JobState.FAILED,
    TaskSignal.CANCEL: JobState.CANCELLED,
}


class InMemoryJobs:
    """Implements ``Jobs``."""

    def __init__(self, plugins: Sequence[NekroPlugin]) -> None:
        self._plugins = {plugin.key: plugin for plugin in plugins}
        self._jobs: dict[str, JobInfo] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waits: dict[tuple[str, str], asyncio.Future[Any]] = {}
        self._kept: dict[tuple[str, str], Any] = {}

    async def start(self, request: JobRequest) -> JobInfo:
        """Start a job as a task."""
        open_one = self.peek(request.plugin_key, request.task_type, request.task_id)
        if open_one is not None and not open_one.state.is_final:
            raise ConflictError(f"job {request.task_type} {request.task_id!r} is open")
        job = JobInfo(
            id=f"j{len(self._jobs) + 1}",
            plugin_key=request.plugin_key,
            task_type=request.task_type,
            task_id=request.task_id,
            chat_key=request.chat_key,
            state=JobState.RUNNING,
            percent=0,
            message="",
            data=None,
            cancel_requested=False,
        )
        self._jobs[job.id] = job
        running = asyncio.create_task(self._run(job, request))
        # A task that is cancelled before its first step never runs any code of _run.
        running.add_done_callback(lambda _: self._finish(job.id, request, TaskCtl.cancel("cancelled")))
        self._tasks[job.id] = running
        return job

    def peek(self, plugin_key: str, task_type: str, task_id: str) -> JobInfo | None:
        """Return the newest job of that name, or None."""
        name = (plugin_key, task_type, task_id)
        own = [job for job in self._jobs.values() if (job.plugin_key, job.task_type, job.task_id) == name]
        return own[-1] if own else None

    async def cancel(self, job_id: str) -> bool:
        """Cancel a job; False if it has ended."""
        job = self._jobs.get(job_id)
        if job is None or job.state.is_final:
            return False
        self._update(job_id, cancel_requested=True)
        self._tasks[job_id].cancel()
        return True

    def notify(self, job_id: str, key: str, data: Any) -> bool:
        """Pass data to a wait, now or later."""
        job = self._jobs.get(job_id)
        if job is None or job.state.is_final:
            return False
        future = self._waits.pop((job_id, key), None)
        if future is not None and not future.done():
            future.set_result(data)
        else:
            self._kept[job_id, key] = data
        return True

    async def wait(self, job_id: str, key: str, *, timeout_seconds: float | None) -> Any:
        """Return the data of ``notify``."""
        if (job_id, key) in self._kept:
            return self._kept.pop((job_id, key))
        future = asyncio.get_running_loop().create_future()
        self._waits[job_id, key] = future
        async with asyncio.timeout(timeout_seconds):
            return await future

    def cancel_wait(self, job_id: str, key: str | None = None) -> int:
        """Cancel waits; returns their number."""
        chosen = [pair for pair in self._waits if pair[0] == job_id and key in (None, pair[1])]
        return sum(self._waits.pop(pair).cancel() for pair in chosen)

    def running(self) -> list[JobInfo]:
        """Return every open job."""
        return [job for job in self._jobs.values() if not job.state.is_final]

    async def settled(self) -> None:
        """Wait until no job runs."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        """Cancel every job and wait until all have ended."""
        for task in self._tasks.values():
            task.cancel()
        await self.settled()

    async def _run(self, job: JobInfo, request: JobRequest) -> None:
        plugin = self._plugins[job.plugin_key]
        handle = AsyncTaskHandle(job.task_id, job.chat_key, plugin, job_id=job.id, task_type=job.task_type)

        async def report(signal: TaskCtl) -> None:
            self._update(job.id, percent=signal.progress or 0, message=signal.message)

        try:
            func = plugin.task_types[job.task_type]
            with paying(Payer(plugin_key=plugin.key, chat_key=job.chat_key or None)):
                last = await drive(func, handle, request.args, request.kwargs, report=report)
        except asyncio.CancelledError:
            last = TaskCtl.cancel("cancelled")
        self._finish(job.id, request, last)

    def _finish(self, job_id: str, request: JobRequest, last: TaskCtl) -> None:
        if self._jobs[job_id].state.is_final:
            return
        data = str(last.data) if isinstance(last.data, BaseException) else last.data
        percent = 100 if last.signal is TaskSignal.SUCCESS else self._jobs[job_id].percent
        self._update(job_id, state=_FINAL[last.signal], message=last.message, data=data, percent=percent)
        _call_back(request.on_terminal, last)

    def _update(self, job_id: str, **changes: Any) -> None:
        self._jobs[job_id] = dataclasses.replace(self._jobs[job_id], **changes)


def _call_back(callback: Callable[[Any], object] | None, last: TaskCtl) -> None:
    if callback is not None:
        callback(last)
