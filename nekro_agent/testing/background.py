"""Background jobs as asyncio tasks of the test's loop."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from nekro_agent.errors import ConflictError
from nekro_agent.execution.current import Payer, paying
from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, TaskSignal, drive
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import JobInfo, JobRequest, JobState

__all__ = ["InMemoryJobs"]


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
