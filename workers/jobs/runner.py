"""Executes a background job on a worker: the work behind the task ``nekro.jobs.run``, without Celery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from nekro.app.calls.waits import job_ended
from nekro.app.chats.writer import trace_of
from nekro.app.jobs import notify_chat_of_failure, plain_data, unpack
from nekro.app.leases import on_this_loop
from nekro.app.retried_writes import write_with_retries
from nekro.base.loop_thread import CANCEL_SECONDS
from nekro.base.redaction import Redactor
from nekro.base.tasks import complete
from nekro.broker.tracing import TurnTrace, is_tracing, span
from nekro_agent.durations import GRACE_SECONDS
from nekro_agent.errors import (
    ArgumentError,
    BrokerUnavailableError,
    FencedError,
    MethodDisabledError,
    MethodFailedError,
    MethodNotFoundError,
    NekroError,
    StorageUnavailableError,
)
from nekro_agent.execution.current import Payer, paying, working_for
from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, TaskSignal, drive
from nekro_agent.plugin import NekroPlugin, using
from nekro_agent.ports import JobState
from storage.repositories.jobs import Job
from storage.transaction import Transaction
from workers.calls.claims import DuplicateDelivery
from workers.jobs.running import JobLines, RunningJob, RunningJobs

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = ["Interruption", "JobResult", "JobRunner"]

_STATES: Final = {
    TaskSignal.SUCCESS: JobState.SUCCEEDED,
    TaskSignal.FAIL: JobState.FAILED,
    TaskSignal.CANCEL: JobState.CANCELLED,
}


#: Most causes of an exception that are looked at: plugins may link exceptions in a circle.
_MOST_CAUSES: Final = 20


class Interruption(StrEnum):
    """Why the worker stopped a job without a request to cancel it."""

    #: It passed the time limit of its lane.
    TIME_LIMIT = "time_limit"
    #: An operator revoked its task.
    REVOKED = "revoked"
    #: The worker itself is stopping; another one continues with the job.
    SHUTDOWN = "shutdown"

    @property
    def cleanup_seconds(self) -> float:
        """How long the job may clean up before it is abandoned; the pool's own limit may end that earlier."""
        return 0.75 * CANCEL_SECONDS if self is Interruption.SHUTDOWN else GRACE_SECONDS


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """The result of a job's Celery task."""

    job_id: str
    state: JobState
    message: str


class JobRunner:
    """Executes jobs; one instance per worker process."""

    def __init__(
        self,
        *,
        running: RunningJobs,
        plugin_of: Callable[[str], NekroPlugin | None],
        publisher: EventPublisher,
        redactor: Redactor,
        worker_name: str,
    ) -> None:
        self._running = running
        self._database = running.database
        self._plugin_of = plugin_of
        self._publisher = publisher
        self._redactor = redactor
        self._worker_name = worker_name

    async def run(self, job_id: str, *, interruption: Callable[[], Interruption]) -> JobResult:
        """Claim a job, run it to its end and record how it ended.

        Args:
            interruption: called once, when this coroutine was cancelled first; returns the reason.

        Raises:
            DuplicateDelivery: the job has ended or belongs to another worker; nothing was done, or
                the work done is discarded: the job starts again, or another worker has it.
            MethodFailedError: the job failed, which is recorded.
        """
        interruption = cache(interruption)  # while the job cleans up, the worker may begin to stop
        job = await self._claim(job_id)
        trace = await self._trace_of(job)
        lines = JobLines(job.id, self._redactor)
        ids = {"job_id": job.id, "turn_id": job.turn_id, "call_id": job.call_id, "attempt": job.attempt}
        with (
            logger.contextualize(job_id=job.id, job_type=job.type, chat_key=job.chat_key),
            span(f"job {job.plugin_key}.{job.type}", ids, kind="consumer", headers={}, turn=trace) as part,
        ):
            try:
                last, is_chat_notified = await self._carry_out(job, lines, interruption)
            except FencedError as exc:
                logger.bind(fence=job.fence).warning("job_claim_lost")
                raise DuplicateDelivery(job_id) from exc
            except asyncio.CancelledError:
                # The pool's hard limit must not interrupt the record of the end.
                await complete(self._leave(job, lines, interruption()))
                raise
            if last.signal is TaskSignal.FAIL and _is_outage(last.data):
                await complete(self._restart(job, lines, last))
            # A stop that comes now must not lose the end: the job would be started again.
            ended = await complete(self._finish(job, lines, last, is_chat_notified=is_chat_notified))
            part.set_attributes(state=ended.state.value)
            if ended.state is JobState.FAILED:
                part.fail("JobFailed")
        logger.bind(job_id=job.id, state=ended.state.value, attempt=job.attempt).info("job_ended")
        if ended.state is JobState.FAILED:
            error_type = type(last.data).__name__ if isinstance(last.data, BaseException) else "JobFailed"
            raise MethodFailedError(error_type, ended.message)
        return JobResult(job_id=job.id, state=ended.state, message=ended.message)

    async def _trace_of(self, job: Job) -> TurnTrace | None:
        """Return the trace of the turn that started a job; None: there is none, or tracing is off."""
        if job.turn_id is None or not is_tracing():
            return None
        async with self._database.read() as transaction:
            first = await transaction.rounds.find(job.turn_id)
        return None if first is None else trace_of(first)

    async def _claim(self, job_id: str) -> Job:
        async with self._database.begin() as transaction:
            job = await transaction.jobs.claim(
                job_id, worker=self._worker_name, lease_seconds=self._running.lease_seconds
            )
        if job is None:
            raise DuplicateDelivery(job_id)
        if job.attempt > 1:
            logger.bind(job_id=job_id, attempt=job.attempt).warning("job_started_again")
        return job

    async def _carry_out(
        self, job: Job, lines: JobLines, interruption: Callable[[], Interruption]
    ) -> tuple[TaskCtl, bool]:
        """Run the job; returns its last signal, and whether its own code notified the chat of a failure."""
        try:
            plugin, func = self._function(job)
            args, kwargs = unpack(job.args)
        except (MethodNotFoundError, MethodDisabledError, ArgumentError) as exc:
            return TaskCtl.fail(str(exc), exc), False
        work: asyncio.Task[TaskCtl] | None = None
        is_stopped = False

        def cancel() -> None:
            # Once, because a second cancellation would interrupt the job's cleanup. ``cancelling()`` does not
            # say that: a time limit inside the job counts too, until the job has noticed it.
            nonlocal is_stopped
            if work is not None and not is_stopped:
                is_stopped = True
                work.cancel()

        stop = on_this_loop(cancel)
        payer = Payer(
            plugin_key=plugin.key, chat_key=job.chat_key or None, turn_id=job.turn_id, account_id=job.id
        )
        working = working_for(job.chat_key, job.turn_id)
        with using(plugin), paying(payer), working, self._running.follow(job, lines, stop=stop) as running:
            handle = AsyncTaskHandle(
                job.task_id,
                job.chat_key,
                plugin,
                job_id=job.id,
                task_type=job.type,
                stop_requested=lambda: running.must_stop,
            )
            work = asyncio.ensure_future(_contained(drive(func, handle, args, kwargs, report=running.report)))
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                work.cancel()
                await _cleaned_up(work, seconds=interruption().cleanup_seconds)
                raise
        last = _last_signal(running, work)
        # The chat is always notified of an exception: an earlier notice of the job was about something else.
        return last, handle.has_notified_agent and not isinstance(last.data, BaseException)

    def _function(self, job: Job) -> tuple[NekroPlugin, Callable[..., Any]]:
        plugin = self._plugin_of(job.plugin_key)
        if plugin is None:
            raise MethodNotFoundError(f"this worker has not loaded plugin {job.plugin_key}")
        if not plugin.is_enabled:
            raise MethodDisabledError(f"plugin {job.plugin_key} is disabled")
        func = plugin.task_types.get(job.type)
        if func is None:
            raise MethodNotFoundError(f"plugin {job.plugin_key} has no task type {job.type!r} any more")
        return plugin, func

    async def _finish(
        self, job: Job, lines: JobLines, last: TaskCtl, *, is_chat_notified: bool = False
    ) -> Job:
        """Record the end, and notify the chat of a failure; retries for a minute without a database.

        Args:
            is_chat_notified: whether the chat knows of a failure already.

        Raises:
            DuplicateDelivery: another worker took the job over; this end is discarded.
            StorageUnavailableError: the database stayed unavailable; the job will be started again.
        """
        message, data = last.message, plain_data(last.data)
        if last.signal is TaskSignal.FAIL:
            message, data = self._redactor(message), self._redactor(data) if isinstance(data, str) else data

        logged = lines.take()

        async def write(transaction: Transaction) -> Job:
            await transaction.jobs.log(job.id, *logged, fence=job.fence)
            ended = await transaction.jobs.finish(
                job.id, fence=job.fence, state=_STATES[last.signal], message=message, data=data
            )
            await transaction.job_signals.clear(job.id)
            is_awaited = await job_ended(transaction, self._publisher, ended)
            is_wanted = ended.state is JobState.FAILED and ended.cancel_requested_at is None
            if is_wanted and not (is_chat_notified or is_awaited):
                await notify_chat_of_failure(transaction, self._publisher, ended)
            return ended

        try:
            return await write_with_retries(
                self._database.begin, write, unknown=None, seconds=12 * GRACE_SECONDS
            )
        except FencedError as exc:
            logger.bind(job_id=job.id, fence=job.fence).warning("job_claim_lost")
            raise DuplicateDelivery(job.id) from exc

    async def _restart(self, job: Job, lines: JobLines, last: TaskCtl) -> None:
        """Release a job for another start if it failed because our database or broker did not answer.

        Returns if it does not restart: then it has failed.

        Raises:
            DuplicateDelivery: it starts again.
        """
        message = self._redactor(f"starts again after an outage: {last.message}")

        logged = lines.take()

        async def write(transaction: Transaction) -> bool:
            await transaction.jobs.log(job.id, *logged, fence=job.fence)
            return await transaction.jobs.restart(job.id, fence=job.fence, message=message)

        try:
            restarts = await write_with_retries(
                self._database.begin, write, unknown=None, seconds=12 * GRACE_SECONDS
            )
        except FencedError as exc:
            raise DuplicateDelivery(job.id) from exc
        if restarts:
            logger.bind(job_id=job.id, attempt=job.attempt, error=last.message).warning("job_met_an_outage")
            raise DuplicateDelivery(job.id)

    async def _leave(self, job: Job, lines: JobLines, why: Interruption) -> None:
        """Record why the worker stopped the job, or release it for the next worker."""
        ends = {
            Interruption.TIME_LIMIT: TaskCtl.fail("stopped at the time limit of lane long"),
            Interruption.REVOKED: TaskCtl.cancel("its task was revoked"),
        }
        try:
            if why in ends:
                await self._finish(job, lines, ends[why])
                return
            async with self._database.begin() as transaction:
                await transaction.jobs.log(job.id, *lines.take(), fence=job.fence)
                await transaction.jobs.release(job.id, fence=job.fence)
        except (NekroError, DuplicateDelivery) as exc:  # the lease expires by itself
            logger.bind(job_id=job.id, error=str(exc)).warning("job_not_handed_on")


def _is_outage(error: object, *, most: int = _MOST_CAUSES) -> bool:
    """Whether an exception, or what caused it, says that our database or broker did not answer."""
    if isinstance(error, StorageUnavailableError | BrokerUnavailableError):
        return True
    if not isinstance(error, BaseException) or not most:
        return False
    if isinstance(error, BaseExceptionGroup):
        return any(_is_outage(inner, most=most - 1) for inner in error.exceptions)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return _is_outage(cause, most=most - 1)


async def _contained(work: Coroutine[Any, Any, TaskCtl]) -> TaskCtl:
    """Convert a ``BaseException`` to a failure of the job: some of them would end the event loop."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as exc:
        return TaskCtl.fail(f"the job ended in {type(exc).__name__}", exc)


async def _cleaned_up(work: asyncio.Task[TaskCtl], *, seconds: float) -> None:
    """Wait until a cancelled job has ended; it is abandoned after that time, or at a further cancellation."""
    with suppress(asyncio.CancelledError):  # the hard limit, or the end of the worker
        await asyncio.wait([work], timeout=seconds)
    if not work.done():
        logger.warning("job_abandoned")


def _last_signal(running: RunningJob, work: asyncio.Task[TaskCtl]) -> TaskCtl:
    if running.lease.is_lost:
        raise FencedError(f"job {running.job.id}: the claim passed to another worker")
    if not work.cancelled():
        return work.result()
    if running.is_cancelled:
        return TaskCtl.cancel("cancelled on request")
    return TaskCtl.cancel("cancelled by its own code: something that it awaited was cancelled")
