"""The jobs of this process: claims, progress reports, logs, requests to stop them, and callbacks of
their ends.

Works on the background loop, so a job that blocks its own thread keeps its claim and its progress."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from loguru import logger

from nekro.app.background import BackgroundLoop, Poll
from nekro.app.chats.events import record_job
from nekro.app.jobs import info_of, plain_data
from nekro.app.leases import JOB, HeldLease, LeaseKeeper
from nekro.base.tasks import log_errors
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import FencedError, StorageError
from nekro_agent.jobs import TaskCtl
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.job_log import MOST_CHARS
from storage.repositories.jobs import Job

if TYPE_CHECKING:
    from loguru import Message

    from nekro.app.chats.publisher import EventPublisher

__all__ = [
    "JobLines",
    "JobWatch",
    "RunningJob",
    "RunningJobs",
]


#: Most records that wait for one write, about once a second; older ones are dropped.
_MOST_WAITING: Final = 20

_LEAST_LEVEL: Final = "INFO"


class JobLines:
    """The log records of one job's code that wait to be written; thread-safe."""

    def __init__(self, job_id: str, redact: Callable[[str], str]) -> None:
        self._job_id = job_id
        self._redact = redact
        self._waiting: deque[tuple[str, str]] = deque(maxlen=_MOST_WAITING)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep the records of the block's context and of the tasks that it starts."""
        sink = logger.add(
            self._add,
            level=_LEAST_LEVEL,
            format=lambda _: "",
            filter=lambda record: record["extra"].get("job_id") == self._job_id,
            catch=True,
        )
        try:
            yield
        finally:
            with suppress(ValueError):  # the process has configured its log anew
                logger.remove(sink)

    def take(self) -> list[tuple[str, str]]:
        """Remove and return the records that wait, as (level, text)."""
        taken: list[tuple[str, str]] = []
        with suppress(IndexError):
            while True:
                taken.append(self._waiting.popleft())
        return taken

    def put_back(self, taken: list[tuple[str, str]]) -> None:
        """Return records that could not be written; newer ones take their place if there are too many."""
        for line in reversed(taken):
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.appendleft(line)

    def redacted(self, text: str) -> str:
        """Return what the log keeps of a text. Redacts first: a secret that was cut is not recognised."""
        return self._redact(text)[:MOST_CHARS]

    def _add(self, message: Message) -> None:
        record = message.record
        text, error = record["message"], record["exception"]
        if error is not None and error.type is not None:
            text = f"{text}: {error.type.__name__}: {error.value}"
        self._waiting.append((record["level"].name, self.redacted(text)))


#: Least time between two events of a job's progress, and entries of its log; its row has every report.
_EVENT_SECONDS: Final = 2.0


class RunningJob:
    """One job, from its claim until its function has ended."""

    def __init__(self, job: Job, lease: HeldLease, lines: JobLines, *, stop: Callable[[], object]) -> None:
        self.job = job
        self.lease = lease
        self.lines = lines
        self.stop = stop
        #: Whether a stop was requested.
        self.is_cancelled = False
        #: The newest report that was not written.
        self.unwritten: TaskCtl | None = None
        #: When its progress may be recorded as an event again, by ``time.monotonic``.
        self.next_event_at = 0.0

    @property
    def must_stop(self) -> bool:
        """Whether a stop was requested, or the claim passed to another worker; no I/O."""
        return self.is_cancelled or self.lease.is_lost

    async def report(self, signal: TaskCtl) -> None:
        """Schedule a report for writing; a newer report replaces it, so any rate of reports is allowed."""
        self.unwritten = signal


class RunningJobs:
    """The jobs of one process."""

    def __init__(
        self,
        leases: LeaseKeeper,
        background: BackgroundLoop,
        *,
        lease_seconds: float,
        announce: Callable[[str, int, str], object],
        publisher: EventPublisher,
        poll_seconds: float = REFRESH_SECONDS,
    ) -> None:
        """Create the jobs' follower.

        Args:
            announce: called with job id, percent and message of each written report; must neither block
                nor raise.
        """
        self.database = leases.database
        self.lease_seconds = lease_seconds
        self._leases = leases
        self._announce = announce
        self._publisher = publisher
        self._jobs: set[RunningJob] = set()
        self._poll = Poll(
            background,
            self._look,
            seconds=poll_seconds,
            is_needed=lambda: bool(self._jobs),
            on_error="stop_requests_of_jobs_not_read",
        )

    @contextmanager
    def follow(self, job: Job, lines: JobLines, *, stop: Callable[[], object]) -> Iterator[RunningJob]:
        """Keep a job's claim and write its reports and log lines for the length of a block.

        Args:
            stop: called, on any thread, when a stop is requested and when the claim is lost.
        """
        lease = self._leases.hold(JOB, job.id, job.fence, seconds=self.lease_seconds, on_lost=stop)
        running = RunningJob(job, lease, lines, stop=stop)
        self._jobs.add(running)
        try:
            self._poll.start()
            with lines.gathered():
                yield running
        finally:
            self._jobs.discard(running)
            lease.drop()

    async def _look(self) -> None:
        jobs = {(running.job.id, running.job.fence): running for running in list(self._jobs)}
        for running in jobs.values():
            with log_errors("job_progress_not_written", job_id=running.job.id):
                await self._write(running)
        if not jobs:
            return
        async with self.database.read() as transaction:
            requests = await transaction.jobs.stop_requests(list(jobs))
        for row, running in jobs.items():
            if row not in requests:
                running.lease.lose()
            elif requests[row] and not running.is_cancelled:
                running.is_cancelled = True
                running.stop()

    async def _write(self, running: RunningJob) -> None:
        with suppress(FencedError):  # the job has ended, or its claim is lost: the next read shows which
            await self._write_lines(running)
            await self._write_report(running)

    async def _write_lines(self, running: RunningJob) -> None:
        lines = running.lines.take()
        if not lines:
            return
        try:
            async with self.database.begin() as transaction:
                await transaction.jobs.log(running.job.id, *lines, fence=running.job.fence)
        except StorageError:
            running.lines.put_back(lines)
            raise

    async def _write_report(self, running: RunningJob) -> None:
        report = running.unwritten
        if report is None:
            return
        percent: int = running.job.percent if report.progress is None else report.progress
        is_due = time.monotonic() >= running.next_event_at
        async with self.database.begin() as transaction:
            job = await transaction.jobs.progress(
                running.job.id,
                fence=running.job.fence,
                percent=percent,
                message=report.message,
                data=plain_data(report.data),
                logged_as=running.lines.redacted(report.message) if is_due else None,
            )
            if is_due:
                running.next_event_at = time.monotonic() + _EVENT_SECONDS
                await record_job(transaction, self._publisher, EventType.JOB_PROGRESS, job)
        if running.unwritten is report:
            running.unwritten = None
        if running in self._jobs:
            self._announce(job.id, job.percent, job.message)


@dataclass(frozen=True, kw_only=True)
class _Watcher:
    callback: Callable[[Any], object]
    #: The loop that started the job; the callback runs there.
    loop: asyncio.AbstractEventLoop
    #: Context of the code that started the job; the callback is on the same account.
    context: contextvars.Context


class JobWatch:
    """Polls the jobs that this process started and that have a callback, until they end."""

    def __init__(self, database: Database, background: BackgroundLoop) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._watchers: dict[str, _Watcher] = {}
        self._poll = Poll(
            background,
            self._look,
            seconds=REFRESH_SECONDS,
            is_needed=lambda: bool(self._watchers),
            on_error="job_ends_not_seen",
        )

    def add(self, job_id: str, callback: Callable[[Any], object]) -> None:
        """Call ``callback`` with the job's last ``TaskCtl``, on the loop that is running now."""
        watcher = _Watcher(
            callback=callback, loop=asyncio.get_running_loop(), context=contextvars.copy_context()
        )
        with self._lock:
            self._watchers[job_id] = watcher
        self._poll.start()

    async def _look(self) -> None:
        with self._lock:
            watched = list(self._watchers)
        for job_id in watched:
            async with self._database.read() as transaction:
                job = await transaction.jobs.find(job_id)
            if job is not None and not job.state.is_final:
                continue
            with self._lock:
                watcher = self._watchers.pop(job_id)
            if job is not None:
                self._call_back(watcher, TaskCtl.of_job(info_of(job)))

    @staticmethod
    def _call_back(watcher: _Watcher, last: TaskCtl) -> None:
        with suppress(RuntimeError):  # the loop that started the job has ended
            watcher.loop.call_soon_threadsafe(_call, watcher.callback, last, context=watcher.context)


def _call(callback: Callable[[Any], object], last: TaskCtl) -> None:
    try:
        result = callback(last)
        if asyncio.iscoroutine(result):
            task = asyncio.ensure_future(result)
            _running.add(task)
            task.add_done_callback(_ended)
    except Exception:  # a plugin's code on a loop that must continue
        logger.exception("on_terminal_failed")


#: Callbacks that are coroutines; the loop keeps only weak references to tasks.
_running: set[asyncio.Future[Any]] = set()


def _ended(task: asyncio.Future[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.opt(exception=error).error("on_terminal_failed")
