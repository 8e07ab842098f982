"""Background jobs of plugins: registering, starting, querying and signalling them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field

from nekro_agent import runtime
from nekro_agent.core.logger import get_sub_logger, log_failure
from nekro_agent.errors import ConflictError, InvalidValueError
from nekro_agent.files import staging
from nekro_agent.mounts import task_owner_keys, task_owners
from nekro_agent.ports import JobInfo, JobRequest, JobState

if TYPE_CHECKING:
    from nekro_agent.plugin import NekroPlugin

__all__ = [
    "AsyncTaskFunc",
    "AsyncTaskHandle",
    "TaskAPI",
    "TaskCtl",
    "TaskRunner",
    "TaskSignal",
    "drive",
    "runner",
    "task",
]

_log = get_sub_logger("jobs")


class TaskSignal(StrEnum):
    """The kind of a job's report."""

    PROGRESS = "progress"
    SUCCESS = "success"
    FAIL = "fail"
    CANCEL = "cancel"


class TaskCtl(BaseModel):
    """One report of a job: progress or its end."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    signal: TaskSignal
    message: str = ""
    data: Any = None
    #: Percent; None if not applicable.
    progress: int | None = Field(None, ge=0, le=100)

    @classmethod
    def report_progress(cls, message: str, percent: float = 0) -> TaskCtl:
        """Report progress; percent from 0 to 100."""
        # A computed percentage may be fractional or slightly above 100, which must not fail the job.
        progress = max(0, min(int(percent), 100))
        return cls(signal=TaskSignal.PROGRESS, message=message, progress=progress)

    @classmethod
    def success(cls, message: str = "", data: Any = None) -> TaskCtl:
        """End the job as successful."""
        return cls(signal=TaskSignal.SUCCESS, message=message, data=data, progress=100)

    @classmethod
    def fail(cls, message: str, error: BaseException | str | None = None) -> TaskCtl:
        """End the job as failed."""
        return cls(signal=TaskSignal.FAIL, message=message, data=error)

    @classmethod
    def cancel(cls, message: str = "") -> TaskCtl:
        """End the job as cancelled, after a request."""
        return cls(signal=TaskSignal.CANCEL, message=message)

    @property
    def is_terminal(self) -> bool:
        """Whether this is the job's last report."""
        return self.signal is not TaskSignal.PROGRESS

    @classmethod
    def of_job(cls, job: JobInfo) -> TaskCtl:
        """Return a recorded job's latest state as a report."""
        signal = _SIGNALS[job.state]
        return cls(signal=signal, message=job.message, data=job.data, progress=job.percent)


_SIGNALS: Final = {
    JobState.QUEUED: TaskSignal.PROGRESS,
    JobState.RUNNING: TaskSignal.PROGRESS,
    JobState.SUCCEEDED: TaskSignal.SUCCESS,
    JobState.FAILED: TaskSignal.FAIL,
    JobState.CANCELLED: TaskSignal.CANCEL,
}


class AsyncTaskHandle:
    """One job, for its function (as first argument) or for the code that started it."""

    def __init__(
        self,
        task_id: str,
        chat_key: str,
        plugin: NekroPlugin,
        *,
        job_id: str = "",
        task_type: str = "",
        stop_requested: Callable[[], bool] | None = None,
    ) -> None:
        """Create it.

        Args:
            stop_requested: whether the job that runs in this process was asked to end, without I/O; None:
                the job's row says it.
        """
        self.task_id = task_id
        self.chat_key = chat_key
        self.plugin = plugin
        self.job_id = job_id
        self.task_type = task_type
        self._stop_requested = stop_requested
        #: Whether the job's code has sent the agent a message.
        self.has_notified_agent = False

    async def wait(self, key: str, timeout: float | None = None) -> Any:  # noqa: ASYNC109  # the reference's name
        """Wait for ``notify(key, data)`` and return the data; an earlier notification counts too.

        Args:
            timeout: seconds; None or 0 means no limit.

        Raises:
            TimeoutError: no notification came in time.
            asyncio.CancelledError: ``cancel_wait`` or the job's cancellation ended the wait.
        """
        return await runtime.current().service("jobs").wait(self.job_id, key, timeout_seconds=timeout or None)

    def notify(self, key: str, data: Any = None) -> bool:
        """Pass data to ``wait(key)``, now or later; False if the job has ended."""
        return runtime.current().service("jobs").notify(self.job_id, key, data)

    def cancel_wait(self, key: str) -> bool:
        """Cancel a wait; False if there is none."""
        return runtime.current().service("jobs").cancel_wait(self.job_id, key) > 0

    def cancel_all(self) -> int:
        """Cancel every wait of the job; returns their number."""
        return runtime.current().service("jobs").cancel_wait(self.job_id)

    async def notify_agent(self, message: str, trigger: bool = True) -> None:
        """Add a system message to the job's chat and, by default, request a round of the agent."""
        from nekro_agent.api.message import push_system

        await push_system(self.chat_key, message, trigger_agent=trigger)
        self.has_notified_agent = True

    @property
    def is_cancelled(self) -> bool:
        """Whether the job was asked to end; a long loop should check it regularly.

        In the job itself this takes no time and needs no database: its worker follows requests to stop.
        """
        if self._stop_requested is not None:
            return self._stop_requested()
        job = runtime.current().service("jobs").peek(self.plugin.key, self.task_type, self.task_id)
        return job is not None and (job.cancel_requested or job.state is JobState.CANCELLED)


class TaskRunner:
    """``task``: starts and queries jobs."""

    @classmethod
    async def start(
        cls,
        task_type: str,
        task_id: str,
        chat_key: str,
        plugin: NekroPlugin,
        *args: Any,
        on_terminal: Callable[[TaskCtl], object] | None = None,
        **kwargs: Any,
    ) -> AsyncTaskHandle:
        """Start a job.

        Args:
            task_id: the plugin's own name for it; only one open job may have a type and name.
            on_terminal: called with the last ``TaskCtl`` if this process still runs then.

        Raises:
            InvalidValueError: the type is not mounted, or such a job is running.
        """
        task_types = getattr(plugin, "task_types", None)
        if task_types is None:
            raise InvalidValueError(
                f"task.start needs the NekroPlugin as its fourth argument, not {plugin!r}"
            )
        if task_type not in task_types:
            known = ", ".join(plugin.task_types) or "none"
            raise InvalidValueError(f"{plugin.key} has no task type {task_type!r} (it has: {known})")
        request = JobRequest(
            plugin_key=plugin.key,
            task_type=task_type,
            task_id=str(task_id),
            chat_key=chat_key,
            args=args,
            kwargs=kwargs,
            restarts=task_type not in plugin.once_only_tasks,
            on_terminal=on_terminal,
        )
        await staging.commit()
        try:
            job = await runtime.current().service("jobs").start(request)
        except ConflictError as exc:
            raise InvalidValueError(f"task {task_type} {task_id!r} is running already") from exc
        return _handle(job, plugin)

    @classmethod
    def get_handle(cls, task_type: str, task_id: str) -> AsyncTaskHandle | None:
        """Return the open job of that type and name, or None."""
        found = cls._find(task_type, task_id)
        return None if found is None or found[0].state.is_final else _handle(*found)

    @classmethod
    def get_state(cls, task_type: str, task_id: str) -> TaskCtl | None:
        """Return the newest job's latest report, or None if there was no job."""
        found = cls._find(task_type, task_id)
        return None if found is None else TaskCtl.of_job(found[0])

    @classmethod
    def is_running(cls, task_type: str, task_id: str) -> bool:
        """Whether a job of that type and name is open."""
        return cls.get_handle(task_type, task_id) is not None

    @classmethod
    async def cancel(cls, task_type: str, task_id: str) -> bool:
        """Ask a job to end; False if none is open."""
        found = cls._find(task_type, task_id)
        if found is None or found[0].state.is_final:
            return False
        return await runtime.current().service("jobs").cancel(found[0].id)

    @classmethod
    def get_running_tasks(cls) -> list[str]:
        """Return every open job of the plugins of this process as ``<task type>:<task id>``."""
        return [f"{job.task_type}:{job.task_id}" for job in cls._running()]

    @classmethod
    async def stop_all(cls) -> int:
        """Ask every job of the plugins of this process to end; returns their number."""
        jobs = runtime.current().service("jobs")
        return sum([await jobs.cancel(job.id) for job in cls._running()])

    @staticmethod
    def runner() -> TaskRunner:
        """Return the only runner; plugins of the reference access it this way."""
        return task

    @staticmethod
    def _running() -> list[JobInfo]:
        plugins = task_owner_keys()
        jobs = runtime.current().service("jobs").running()
        return [job for job in jobs if job.plugin_key in plugins]

    @staticmethod
    def _find(task_type: str, task_id: str) -> tuple[JobInfo, NekroPlugin] | None:
        """Return the job of the plugin that mounted the type; an open job before an ended one."""
        jobs = runtime.current().service("jobs")
        # Each object with mounts is a NekroPlugin.
        owners = [cast("NekroPlugin", plugin) for plugin in task_owners(task_type)]
        found = [(jobs.peek(plugin.key, task_type, str(task_id)), plugin) for plugin in owners]
        known = [(job, plugin) for job, plugin in found if job is not None]
        return min(known, key=lambda pair: pair[0].state.is_final, default=None)


#: The only runner, under the name that plugins import.
task = TaskRunner()
#: Its class; the methods need no object.
TaskAPI = TaskRunner
#: What ``mount_async_task`` registers.
AsyncTaskFunc: TypeAlias = Callable[..., AsyncGenerator[TaskCtl, None] | Coroutine[Any, Any, Any]]


def runner() -> TaskRunner:
    """Return the only runner."""
    return task


def _handle(job: JobInfo, plugin: NekroPlugin) -> AsyncTaskHandle:
    return AsyncTaskHandle(job.task_id, job.chat_key, plugin, job_id=job.id, task_type=job.task_type)


async def drive(
    func: Callable[..., Any],
    handle: AsyncTaskHandle,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    report: Callable[[TaskCtl], Awaitable[None]],
) -> TaskCtl:
    """Run a job's function to its end and return its last signal; called by the runner of jobs.

    A coroutine function succeeds by returning. An async generator ends with the terminal signal
    that it yields; without one it has failed. An exception is a failure; a cancellation
    propagates.

    Args:
        report: awaited with each signal but the last.
    """
    handle.plugin.refresh_config()
    try:
        label = f"{handle.plugin.key}.{handle.task_type}"
        async with staging.call_scope(label, chat_key=handle.chat_key or None, plugin_key=handle.plugin.key):
            result = func(handle, *args, **kwargs)
            if inspect.isasyncgen(result):
                return await _drive_generator(result, report)
            if inspect.isawaitable(result):
                result = await result
        return result if isinstance(result, TaskCtl) and result.is_terminal else TaskCtl.success(data=result)
    except (Exception, SystemExit) as exc:  # plugin code: any exception is the job's failure
        log = _log.bind(plugin=handle.plugin.key, task_type=handle.task_type)
        log_failure(log, "plugin_task_failed", exc, plugin_key=handle.plugin.key)
        return TaskCtl.fail(f"{type(exc).__name__}: {exc}".rstrip(": "), exc)


async def _drive_generator(
    generator: AsyncIterator[Any], report: Callable[[TaskCtl], Awaitable[None]]
) -> TaskCtl:
    try:
        async for signal in generator:
            if not isinstance(signal, TaskCtl):
                return TaskCtl.fail(f"the task yielded {type(signal).__name__}; it must yield TaskCtl")
            if signal.is_terminal:
                return signal
            await staging.settle()
            await staging.commit()
            await report(signal)
    finally:
        close = getattr(generator, "aclose", None)
        if close is not None:
            await close()
    return TaskCtl.fail("the task ended without TaskCtl.success, fail or cancel")
