"""Background jobs of plugins, usable from any process of the fleet: the SDK's ``Jobs`` port on rows.

A job is a row, then a message on lane ``long``; ``workers.jobs.runner`` executes it. Signals and
waits are rows too, so ``notify`` reaches a ``wait`` in another process in either order.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.app.chats.events import record_job
from nekro.app.jobs import cancel_job, info_of, pack, unpack
from nekro.app.retried_writes import write_with_retries
from nekro.base.tasks import complete, log_errors
from nekro.wire.invocation import new_id
from nekro_agent.durations import POLL_SECONDS, REFRESH_SECONDS
from nekro_agent.errors import ConflictError, StorageUnavailableError
from nekro_agent.execution import greenlets as bridge
from nekro_agent.execution.current import current_account, current_call, effect_id
from nekro_agent.ports import JobInfo, JobRequest
from nekro_client.event_types import EventType
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.driver.errors import outlasting
from storage.engine import Database
from storage.repositories.job_log import WaitState
from storage.repositories.jobs import Job, NewJob
from storage.states import CrashPolicy, JobState, StoredKind
from storage.transaction import Transaction
from workers.jobs.running import JobWatch

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher

__all__ = ["SqlJobs"]

T = TypeVar("T")

#: How long a synchronous function may block its thread for a reading.
ANSWER_SECONDS: Final = 1.0
#: Most open jobs that ``running`` returns.
_MOST_JOBS: Final = 1000


class SqlJobs:
    """Implements ``nekro_agent.ports.Jobs``; one instance per process.

    ``peek``, ``notify`` and ``cancel_wait`` are synchronous functions that need the database. Called
    directly in a plugin's coroutine they wait without blocking the event loop
    (``nekro_agent.execution.greenlets``). Called anywhere else (a task or a thread that the plugin started)
    they block their thread while the background loop executes the query: about a millisecond, at
    most ``ANSWER_SECONDS``. There a write that meets a locked database continues in the background
    after ``POLL_SECONDS``; it is lost only if the process dies before it ends. While the database does not
    answer, ``peek`` and ``running`` return what they returned before.
    """

    def __init__(self, database: Database, background: BackgroundLoop, publisher: EventPublisher) -> None:
        self._database = database
        self._background = background
        self._publisher = publisher
        self._watch = JobWatch(database, background)
        self._alarms = _Alarms()
        self._seen = _LastAnswers()

    async def start(self, request: JobRequest) -> JobInfo:
        """Record the job and publish its message.

        A call that is repeated because its worker died gets the job that it has started, unless that job
        was asked to end.

        Raises:
            ConflictError: a job of that plugin, type and name is open.
            ArgumentError: an argument is not plain data.
            StorageUnavailableError: the database does not answer; the job will not run.
            OutcomeUnknownError: the database does not answer; the job may run.
        """
        call = current_call(request.chat_key)
        name = (request.plugin_key, request.task_type, request.task_id)
        new = NewJob(
            id=effect_id("job", *name),
            type=request.task_type,
            task_id=request.task_id,
            plugin_key=request.plugin_key,
            chat_key=request.chat_key,
            args=pack(request.args, request.kwargs),
            on_crash=CrashPolicy.RESTART if request.restarts else CrashPolicy.FAIL,
            call_id=call.call_id if call else None,
            round_id=call.round_id if call else None,
            turn_id=call.turn_id if call else None,
        )
        account_id = current_account()

        async def write(transaction: Transaction) -> Job:
            nonlocal new
            job = await transaction.jobs.find(new.id)
            while job is not None and job.cancel_requested_at is not None:
                new = dataclasses.replace(new, id=effect_id("job", *name))
                job = await transaction.jobs.find(new.id)
            if job is None:
                job = await transaction.jobs.add(new)
                await transaction.keys.pass_on(account_id, new.id)
                size = ROW_BYTES + size_of(json.dumps(new.args))
                transaction.stored_bytes.add(account_id, StoredKind.ROUNDS, size)
                await record_job(transaction, self._publisher, EventType.JOB_STARTED, job)
            if job.state is JobState.QUEUED:
                transaction.after_commit(partial(self._publisher.job_queued, job.id, job.chat_key))
            return job

        unknown = f"job {new.id} ({new.type}) may or may not run"
        job = await write_with_retries(self._database.begin, write, unknown=unknown)
        if request.on_terminal is not None:
            self._watch.add(job.id, request.on_terminal)
        info = info_of(job)
        return self._seen.answer(name, lambda: info)

    def peek(self, plugin_key: str, task_type: str, task_id: str) -> JobInfo | None:
        """Return the newest job of that name, or None.

        Raises:
            StorageUnavailableError: the database does not answer, and was not asked before.
        """
        name = (plugin_key, task_type, task_id)
        return self._seen.answer(name, lambda: self._answer(self._latest(*name)))

    @outlasting
    async def cancel(self, job_id: str) -> bool:
        """Request a job's end, which the job notices within a second; False when it has already ended.

        Raises:
            NotFoundError: there is no such job.
        """
        async with self._database.read() as transaction:
            if (await transaction.jobs.get(job_id)).state.is_final:
                return False
        await cancel_job(self._database, self._publisher, job_id, reason="cancelled by a plugin")
        return True

    def notify(self, job_id: str, key: str, data: Any) -> bool:
        """Pass data to a job's ``wait(key)``; stored if there is no wait yet. False when the job has ended.

        Raises:
            ArgumentError: the data are not plain data.
        """
        packed = pack((data,), {})
        try:
            if not self._answer(self._is_open(job_id)):
                return False
        except StorageUnavailableError:
            logger.bind(job_id=job_id, key=key).warning("signal_waits_for_database")
        self._write(self._signal(job_id, key, packed))
        return True

    async def wait(self, job_id: str, key: str, *, timeout_seconds: float | None) -> Any:
        """Return the data of ``notify`` for ``key``, and delete them.

        A second wait for the same key replaces the first, which is cancelled; the end of the job
        cancels every wait.

        Raises:
            TimeoutError: no signal came in time.
            asyncio.CancelledError: the wait was cancelled.
            ConflictError: the job has ended or does not exist.
        """
        if not await self._is_open(job_id):
            raise ConflictError(f"job {job_id} has ended, so no signal can reach it")
        waiter = new_id()
        async with self._waiting(job_id, key, waiter) as signalled, asyncio.timeout(timeout_seconds):
            while True:
                signalled.clear()
                # The job waits anyway, so it waits for a database that does not answer too.
                with suppress(StorageUnavailableError):
                    packed = await self._take(job_id, key, waiter)
                    if packed is not None:
                        return unpack(packed)[0][0]
                try:
                    async with asyncio.timeout(REFRESH_SECONDS):
                        await signalled.wait()
                except TimeoutError:
                    continue

    def cancel_wait(self, job_id: str, key: str | None = None) -> int:
        """Cancel the waits for ``key``, or all waits of the job; returns their number.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        waiting = self._answer(self._waiting_keys(job_id, key))
        if waiting:
            self._write(self._cancel_waits(job_id, key))
        return len(waiting)

    def running(self) -> list[JobInfo]:
        """Return every open job.

        Raises:
            StorageUnavailableError: the database does not answer, and was not asked before.
        """
        return self._seen.answer((), lambda: self._answer(self._open_ones()))

    @outlasting
    async def _open_ones(self) -> list[JobInfo]:
        async with self._database.read() as transaction:
            jobs = await transaction.jobs.newest(limit=_MOST_JOBS, open_only=True)
        return [info_of(job) for job in jobs if not job.is_call]

    def _answer(self, question: Coroutine[Any, Any, T]) -> T:
        if bridge.can_wait():
            return bridge.wait(question)
        return self._background.answer(question, seconds=ANSWER_SECONDS)

    def _write(self, write: Coroutine[Any, Any, None]) -> None:
        if bridge.can_wait():
            bridge.wait(write)
        else:
            self._background.settle(write, seconds=POLL_SECONDS)

    @outlasting
    async def _latest(self, plugin_key: str, task_type: str, task_id: str) -> JobInfo | None:
        async with self._database.read() as transaction:
            job = await transaction.jobs.find_latest(plugin_key, task_type, task_id)
        return None if job is None or job.is_call else info_of(job)

    @outlasting
    async def _is_open(self, job_id: str) -> bool:
        async with self._database.read() as transaction:
            job = await transaction.jobs.find(job_id)
        return job is not None and not job.state.is_final

    @outlasting
    async def _signal(self, job_id: str, key: str, packed: dict[str, str]) -> None:
        async with self._database.autocommit() as transaction:
            await transaction.job_signals.signal(job_id, key=key, data=packed)
        self._alarms.ring(job_id, key)

    async def _waiting_keys(self, job_id: str, key: str | None) -> list[str]:
        async with self._database.read() as transaction:
            return await transaction.job_signals.waiting_keys(job_id, key=key)

    @outlasting
    async def _cancel_waits(self, job_id: str, key: str | None) -> None:
        async with self._database.autocommit() as transaction:
            await transaction.job_signals.cancel(job_id, key=key)
        self._alarms.ring(job_id, key)

    async def _take(self, job_id: str, key: str, waiter: str) -> dict[str, str] | None:
        """Remove and return the signal if it has arrived.

        Raises:
            asyncio.CancelledError: the wait was cancelled.
        """
        async with self._database.read() as transaction:
            state = await transaction.job_signals.look(job_id, key=key, waiter=waiter)
        packed = None
        if state is WaitState.READY:
            async with self._database.begin() as transaction:
                view = await transaction.job_signals.take(job_id, key=key, waiter=waiter)
            state, packed = view.state, view.data
        if state is WaitState.CANCELLED:
            raise asyncio.CancelledError(f"the wait of job {job_id} for {key!r} was cancelled")
        return packed

    @asynccontextmanager
    async def _waiting(self, job_id: str, key: str, waiter: str) -> AsyncIterator[asyncio.Event]:
        await self._begin_wait(job_id, key, waiter)
        try:
            with self._alarms.set(job_id, key) as signalled:
                yield signalled
        finally:
            # A cancelled caller must not leave the row of its wait behind.
            with log_errors("wait_not_ended", job_id=job_id):
                await complete(self._end_wait(job_id, key, waiter))

    @outlasting
    async def _begin_wait(self, job_id: str, key: str, waiter: str) -> None:
        async with self._database.autocommit() as transaction:
            await transaction.job_signals.begin(job_id, key=key, waiter=waiter)

    @outlasting
    async def _end_wait(self, job_id: str, key: str, waiter: str) -> None:
        async with self._database.autocommit() as transaction:
            await transaction.job_signals.end(job_id, key=key, waiter=waiter)


class _LastAnswers:
    """What synchronous functions have returned, for the time in which the database does not answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[tuple[str, ...], Any] = {}

    def answer(self, question: tuple[str, ...], ask: Callable[[], T]) -> T:
        """Return what ``ask`` returns; if it cannot tell, what it returned before.

        Raises:
            StorageUnavailableError: it cannot tell, and was not asked before.
        """
        try:
            found = ask()
        except StorageUnavailableError:
            with self._lock:
                if question not in self._answers:
                    raise
                return cast("T", self._answers[question])
        with self._lock:
            self._answers.pop(question, None)
            self._answers[question] = found
            if len(self._answers) > _MOST_JOBS:
                del self._answers[next(iter(self._answers))]
        return found


class _Alarms:
    """Wakes waits of this process at once; waits in other processes poll."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[tuple[str, str], dict[asyncio.Event, asyncio.AbstractEventLoop]] = {}

    @contextmanager
    def set(self, job_id: str, key: str) -> Iterator[asyncio.Event]:
        """Return an event of the running loop, which ``ring`` sets."""
        event = asyncio.Event()
        with self._lock:
            self._waits.setdefault((job_id, key), {})[event] = asyncio.get_running_loop()
        try:
            yield event
        finally:
            with self._lock:
                events = self._waits[job_id, key]
                del events[event]
                if not events:
                    del self._waits[job_id, key]

    def ring(self, job_id: str, key: str | None) -> None:
        """Wake the waits for ``key``, or all waits of the job; thread-safe."""
        with self._lock:
            found = [
                pair
                for (job, name), events in self._waits.items()
                if job == job_id and key in (None, name)
                for pair in events.items()
            ]
        for event, loop in found:
            with suppress(RuntimeError):  # that loop has ended, and its waits with it
                loop.call_soon_threadsafe(event.set)
