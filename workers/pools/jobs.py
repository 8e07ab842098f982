"""Shared by the pools: one delivery as a job, its time limits, and threads that run event loops.

A job runs through Celery's own ``apply_target`` and tracer, unmodified. Two things are added:

- It can be stopped from outside, for one reason (``StopReason``). Stopping cancels what the body
  awaits; storing a result that already exists is never interrupted.
- Its outcome is reported exactly once. Celery's threads pool reports nothing when a body ends
  in a ``BaseException``, and the delivery then occupies a slot for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Final

from billiard.einfo import ExceptionInfo
from celery.concurrency.base import apply_target
from celery.exceptions import Ignore
from loguru import logger

from nekro.base.deadlines import Deadlines
from nekro.base.greenlet_bridge import spawn
from nekro.base.loop_thread import this_task
from nekro.broker.celery.tasks import PrivateRequest
from nekro_agent.errors import MethodAbortedError

__all__ = [
    "BodyOutcome",
    "Interruptible",
    "JobStopped",
    "PoolJob",
    "StopReason",
    "TaskBody",
    "aborted",
    "current_job",
]

#: Above any process id of Linux (2**22), so ``terminate_job`` can never name a real process.
_numbers = itertools.count((1 << 22) + 1)
#: Guards the state of every job, for short times; one shared lock uses less memory than thousands.
#: Reentrant, because a signal handler may stop jobs on the thread that holds it.
_lock: Final = threading.RLock()
_current: ContextVar[PoolJob | None] = ContextVar("nekro_job", default=None)


class StopReason(StrEnum):
    """Why a job must stop."""

    #: Its soft time limit passed: the body gets ``SoftTimeLimitExceeded`` and may clean up.
    SOFT_LIMIT = "soft_limit"
    #: Its hard time limit passed: its failure is reported at once, whatever the body does then.
    HARD_LIMIT = "hard_limit"
    #: It was revoked, or its worker shuts down; Celery decides what happens to the message.
    TERMINATED = "terminated"

    @property
    def is_final(self) -> bool:
        """Whether the outcome is decided elsewhere, so the body's own outcome is ignored."""
        return self is not StopReason.SOFT_LIMIT


class JobStopped(Ignore):  # type: ignore[misc]
    """Ends the body of a stopped job; Celery stores no result for it."""


def current_job() -> PoolJob | None:
    """The job of the calling code or coroutine; None outside of our pools."""
    return _current.get()


def aborted(exc: BaseException) -> MethodAbortedError:
    """Return the ordinary error for a ``BaseException`` in which plugin code ended."""
    detail = f"{type(exc).__name__}({exc})" if str(exc) else type(exc).__name__
    return MethodAbortedError(f"the method ended in {detail}")


@dataclass(frozen=True, slots=True)
class BodyOutcome:
    """The outcome of a body: a value, or the exception that it raised."""

    value: Any = None
    error: Exception | None = None

    def get(self) -> Any:
        """Return the value or raise."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(eq=False, slots=True, weakref_slot=True)
class PoolJob:
    """One delivery in a pool. Celery refers to it by ``pid`` and by the object from ``apply_async``."""

    target: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    callback: Callable[[Any], Any]
    accept_callback: Callable[..., Any] | None
    error_callback: Callable[[Any], Any] | None
    timeout_callback: Callable[[bool, float], Any] | None
    soft_limit_seconds: float | None
    hard_limit_seconds: float | None
    pid: int = field(default_factory=lambda: next(_numbers))
    stop_reason: StopReason | None = None
    #: The body's outcome if it ran before the tracer; None: the tracer runs the body.
    outcome: BodyOutcome | None = None
    #: The ``workers.pools.observation`` of the job, if it was started before the tracer.
    observation: Any = None
    #: When its next limit passes, for ``Alarms``; 0: no limit is set.
    alarm_tick: int = 0
    is_past_soft_limit: bool = False
    _cancel: Callable[[], None] | None = None
    _depth: int = 0
    _body_is_over: bool = False
    _is_reported: bool = False
    _has_begun: bool = False
    _is_dropped: bool = False

    @property
    def task_id(self) -> str:
        """Id of the task, which Celery passes to its tracer as the second argument."""
        return str(self.args[1])

    @property
    def request(self) -> PrivateRequest | None:
        """The request of the delivery; None if the job was not made from one."""
        request = getattr(self.callback, "__self__", None)
        return request if isinstance(request, PrivateRequest) else None

    @property
    def has_begun(self) -> bool:
        """Whether it has started."""
        return self._has_begun

    def drop(self) -> bool:
        """Keep a job from starting, from any thread; returns False when it has started."""
        with _lock:
            self._is_dropped = not self._has_begun
            return self._is_dropped

    def begin(self) -> bool:
        """Start the job in the calling context; False when it was dropped before."""
        with _lock:
            self._has_begun = not self._is_dropped
        _current.set(self)
        return self._has_begun

    def run(self) -> None:
        """Run Celery's tracer and report its outcome; raises nothing."""
        if self.begin():
            self.trace(accept=self.accept_callback)

    def trace(self, *, accept: Callable[..., Any] | None) -> None:
        """Run Celery's tracer for a job that has started.

        Args:
            accept: called when the job starts; None if that was reported before.
        """
        try:
            apply_target(self.target, self.args, self.kwargs, self._report, accept, pid=self.pid)
        except BaseException as exc:  # the slot must be freed whatever a task did
            self.escape(exc)

    def succeed(self, value: Any, seconds: float) -> None:
        """Report a success whose result is already stored, as ``trace`` does at its end."""
        try:
            self._report((False, value, seconds))
        except Exception as exc:
            self.escape(exc)

    def stop(self, reason: StopReason) -> bool:
        """Stop the body, from any thread; returns False when it is over and its outcome is final.

        Celery calls this twice when it terminates a task, and a shutdown may call it again. The body is
        cancelled at most once for its soft limit and then once for a final reason, because a further
        cancellation would interrupt its cleanup.
        """
        with _lock:
            if self._body_is_over:
                return False
            if self.stop_reason is not None and (self.stop_reason.is_final or not reason.is_final):
                return True
            self.stop_reason = reason
            cancel = self._cancel
        if cancel is not None:
            cancel()
        return True

    def terminate(self, signal: object = None) -> None:
        """Stop the job; Celery calls this on the object that ``apply_async`` returned."""
        self.stop(StopReason.TERMINATED)

    def report_hard_limit(self) -> None:
        """Report to Celery that the hard time limit passed: it stores the failure and acknowledges."""
        if self.timeout_callback is None:
            return
        try:
            self.timeout_callback(False, self.hard_limit_seconds or 0)
        except Exception:  # the pool's loop must continue
            logger.bind(pid=self.pid).exception("time_limit_not_reported")

    def report_soft_limit(self) -> None:
        """Report to Celery that the soft time limit passed: it logs a warning."""
        if self.timeout_callback is not None:
            self.timeout_callback(True, self.soft_limit_seconds or 0)

    def _report(self, outcome: Any) -> None:
        abortion = _abortion(outcome)
        if abortion is not None:
            self.escape(abortion)
            return
        self._is_reported = True
        if self.stop_reason is None or not self.stop_reason.is_final:
            self.callback(outcome)

    def escape(self, exc: BaseException) -> None:
        """Report an exception that was not handled anywhere else."""
        if self._is_reported:
            logger.bind(pid=self.pid).opt(exception=exc).error("exception_after_job")
            return
        self._is_reported = True
        if (self.stop_reason is not None and self.stop_reason.is_final) or self.error_callback is None:
            return
        try:
            self.error_callback(_exception_info(exc))
        except BaseException:  # the caller's deadline covers the loss; the pool must continue
            logger.bind(pid=self.pid, failure=repr(exc)).exception("failure_not_reported")


def _abortion(outcome: Any) -> BaseException | None:
    """Return the exception of an outcome that Celery's callback cannot handle; None when it can.

    ``apply_target`` wraps a BaseException in a WorkerLostError, which would cause the message to be
    delivered again, and reports it in a form that the callback does not accept. The tracer passes
    a MemoryError on as an ordinary failure, and the callback then raises before it acknowledges.
    """
    if isinstance(outcome, ExceptionInfo):
        wrapper: BaseException = getattr(outcome.exception, "exc", outcome.exception)
        return wrapper.__context__ or wrapper
    failed, value, _ = outcome
    exc = value.exception if failed else None
    exc = getattr(exc, "exc", exc)
    return exc if isinstance(exc, MemoryError | SystemExit | KeyboardInterrupt) else None


def _exception_info(exc: BaseException) -> Any:
    """Return a failure in Celery's form, always as an ordinary exception: others stop or stall a worker."""
    try:
        if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
            raise exc
        raise aborted(exc) from exc
    except Exception:
        return ExceptionInfo()


class TaskBody:
    """The part of a task that can be stopped; used as ``with TaskBody():`` around plugin code.

    Converts a ``BaseException`` other than our own, and ``MemoryError``, to
    ``MethodAbortedError``. Raises ``JobStopped`` at its end when the job was stopped for a final reason.
    """

    __slots__ = ("_job",)

    def __init__(self) -> None:
        self._job = current_job()

    def __enter__(self) -> TaskBody:
        job = self._job
        if job is not None:
            with _lock:
                job._depth += 1
                job._body_is_over = False
                is_stopped = job.stop_reason is not None and job.stop_reason.is_final
            if is_stopped:
                self._leave(job)
                raise JobStopped(f"job stopped: {job.stop_reason}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._job is not None:
            self._leave(self._job)
            reason = self._job.stop_reason
            if reason is not None and reason.is_final:
                raise JobStopped(f"job stopped: {reason}") from exc
        if exc is not None and (not isinstance(exc, Exception) or isinstance(exc, MemoryError)):
            raise aborted(exc) from exc

    @staticmethod
    def _leave(job: PoolJob) -> None:
        with _lock:
            job._depth -= 1
            job._body_is_over = job._depth == 0


class Cancellable:
    """Lets ``PoolJob.stop`` cancel a task of an event loop: ``with Cancellable(task):`` around its await."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._job, self._task = current_job(), task
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        if self._job is not None:
            with _lock:
                self._job._cancel = self._cancel
                reason = self._job.stop_reason
            if reason is not None:
                self._task.cancel()

    def __exit__(self, *_: object) -> None:
        if self._job is not None:
            with _lock:
                self._job._cancel = None

    def _cancel(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed and runs nothing
            self._loop.call_soon_threadsafe(self._task.cancel)


class Interruptible:
    """``with Interruptible():`` around an await of a task: ``PoolJob.stop`` cancels only that await."""

    __slots__ = ("_interruptions", "_is_inside", "_job", "_loop", "_task")

    def __init__(self) -> None:
        self._job, self._task = current_job(), this_task()
        self._loop = self._task.get_loop()
        self._is_inside = False
        self._interruptions = 0

    @property
    def was_interrupted(self) -> bool:
        """Whether the job was stopped while the task was inside the block."""
        return self._interruptions > 0

    def __enter__(self) -> Interruptible:
        self._is_inside = True
        if self._job is not None:
            with _lock:
                self._job._cancel = self._ask
                is_stopped = self._job.stop_reason is not None
            if is_stopped:  # stopped before this block began
                self._ask()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_inside = False
        if self._job is not None:
            with _lock:
                self._job._cancel = None
        for _number in range(self._interruptions):
            self._task.uncancel()

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed and runs nothing
            self._loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        if self._is_inside:
            self._interruptions += 1
            self._task.cancel()


class Alarms:
    """The time limits of running jobs, as timers of an event loop; use it on that loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, on_hard_limit: Callable[[PoolJob], None]) -> None:
        self._loop = loop
        self._on_hard_limit = on_hard_limit
        self._deadlines = Deadlines(loop, self._ring)
        self._reports: set[asyncio.Task[None]] = set()

    def arm(self, job: PoolJob) -> None:
        """Start a job's limits."""
        seconds = job.soft_limit_seconds or job.hard_limit_seconds
        if seconds:
            job.alarm_tick = self._deadlines.add(job, seconds)

    def disarm(self, job: PoolJob) -> None:
        """Cancel a job's limits."""
        self._deadlines.discard(job, job.alarm_tick)

    def _ring(self, job: PoolJob) -> None:
        if job.soft_limit_seconds and not job.is_past_soft_limit:
            self._soft(job)
        else:
            self._hard(job)

    def _soft(self, job: PoolJob) -> None:
        job.is_past_soft_limit = True
        soft, hard = job.soft_limit_seconds or 0, job.hard_limit_seconds
        if hard:
            job.alarm_tick = self._deadlines.add(job, max(0, hard - soft))
        if job.stop(StopReason.SOFT_LIMIT):
            job.report_soft_limit()

    def _hard(self, job: PoolJob) -> None:
        if not job.stop(StopReason.HARD_LIMIT):
            return
        report = self._loop.create_task(spawn(job.report_hard_limit))
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        self._on_hard_limit(job)
