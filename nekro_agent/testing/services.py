"""The services of a test's world: those of a worker on a new SQLite file, and what a test asks them for.

Background jobs are tasks of the test's loop, as those of a worker need a broker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from broker_config.settings import DatabaseSettings
from nekro.app.chats.writer import TimerFirings
from nekro_agent.errors import ConflictError
from nekro_agent.execution.current import Payer, paying
from nekro_agent.jobs import AsyncTaskHandle, TaskCtl, TaskSignal, drive
from nekro_agent.plugin import NekroPlugin
from nekro_agent.ports import IncomingMessage, JobInfo, JobRequest, JobState, MessageKind, OutgoingMessage
from nekro_agent.records import StoredMessage
from storage.driver.urls import SQLITE_FILE_NAME
from storage.engine import Database
from storage.migrate import upgrade
from storage.timer_services import Firing, SqlTimers
from workers.sdk_runtime import SqlMessages, SqlRecords

if TYPE_CHECKING:
    from nekro.app.chats.publisher import EventPublisher as _Publisher
else:
    _Publisher = object  # it publishes nothing; the real one imports Celery

__all__ = [
    "InMemoryJobs",
    "RecordedTriggers",
    "WorldMessages",
    "WorldTimers",
    "new_database",
]


T = TypeVar("T")


@cache
def _empty_file() -> bytes:
    """Return an empty SQLite file that has the schema; making it takes longer than a test."""
    with TemporaryDirectory(prefix="nekro-") as directory:
        _now(upgrade(DatabaseSettings(), Path(directory)))
        return (Path(directory) / SQLITE_FILE_NAME).read_bytes()


def new_database(directory: Path) -> Database:
    """Create an empty database in a directory that has none."""
    (directory / SQLITE_FILE_NAME).write_bytes(_empty_file())
    return Database(DatabaseSettings(), directory)


def _now(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine to code that cannot await: another thread runs it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class RecordedTriggers(_Publisher):
    """Records the chats whose rounds would be announced; nothing is published."""

    def __init__(self) -> None:
        # Not that of ``EventPublisher``, which needs a Celery application and starts threads.
        self.adapters = frozenset()
        #: Chats whose agent was triggered, in order.
        self.chats: list[str] = []

    async def round_requested(self, chat_key: str, *, later: bool = False) -> None:
        """Record the chat."""
        self.chats.append(chat_key)

    def events_added(
        self, chat_key: str, number: int, *, types: frozenset[str] = frozenset(), later: bool = False
    ) -> None:
        """Announce nothing; a test has no subscribers."""


class WorldMessages(SqlMessages):
    """Implements ``Messages`` and ``Intake``; keeps what plugins sent and which agents they triggered."""

    def __init__(self, database: Database, records: SqlRecords, triggers: RecordedTriggers) -> None:
        super().__init__(database, triggers)
        self._records = records
        #: Messages that plugins sent, in order.
        self.sent: list[OutgoingMessage] = []
        #: Chats whose agent was triggered, in order.
        self.triggered = triggers.chats
        #: Ids that messages of plugins were given.
        self._ids: set[str] = set()

    async def send(self, message: OutgoingMessage) -> str:
        """Record a message of the agent."""
        message_id = await super().send(message)
        if self._is_new(message.id):
            self.sent.append(message)
        return message_id

    async def push_system(
        self,
        chat_key: str,
        text: str,
        *,
        trigger_agent: bool,
        call_id: str | None,
        message_id: str | None = None,
    ) -> str:
        """Record a system message."""
        wakes = self._is_new(message_id) and trigger_agent
        return await super().push_system(
            chat_key, text, trigger_agent=wakes, call_id=call_id, message_id=message_id
        )

    async def receive(self, message: IncomingMessage) -> str | None:
        """Record a message of a person, without hooks; implements ``Intake``."""
        row = await self._records.add_message(
            message.chat_key,
            kind=MessageKind.USER,
            text=message.text,
            sender_id=message.user_id,
            sender_name=message.user_name,
            data={"is_tome": int(message.is_tome), "content_data": list(message.content_data)},
        )
        if message.is_tome:
            await self.wake(message.chat_key)
        return row.id

    def add(
        self,
        chat_key: str,
        kind: MessageKind,
        text: str,
        *,
        sender_id: str | None = None,
        sender_name: str | None = None,
        message_id: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> str:
        """Record a message, for example one of a person; returns its id."""
        new = self._records.add_message(
            chat_key,
            kind=kind,
            text=text,
            message_id=message_id,
            sender_id=sender_id,
            sender_name=sender_name,
            data=data,
        )
        return _now(self._once(new)).id

    @property
    def history(self) -> list[StoredMessage]:
        """Every recorded message of every chat, in order."""
        every = _now(self._once(self._records.messages(chat_key=None, since=None, limit=1 << 20)))
        return [row for row in reversed(every) if not (row.data or {}).get("hidden")]

    def texts(self, chat_key: str, kind: MessageKind) -> list[str]:
        """Return the texts of a chat's messages of one kind; a file without text is its name in brackets."""
        rows = [row for row in self.history if row.chat_key == chat_key and row.kind is kind]
        return [row.text or f"[{(row.data or {}).get('file_name')}]" for row in rows]

    async def _once(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        finally:
            await self._database.dispose_loop()

    def _is_new(self, message_id: str | None) -> bool:
        if message_id is None:
            return True
        is_new = message_id not in self._ids
        self._ids.add(message_id)
        return is_new


class WorldTimers(SqlTimers):
    """Implements ``Timers``; a test fires them."""

    def __init__(self, database: Database, firings: TimerFirings) -> None:
        super().__init__(database)
        self._firings = firings

    async def fire_due(self, now: datetime) -> int:
        """Fire timers that are due at ``now``; returns their number."""
        async with self._database.begin() as tx:
            ids = await tx.timers.open_ids(None, after="", limit=1 << 20)
            due = [timer for timer in await tx.timers.open_of(ids) if timer.fire_at <= now]
            for timer in sorted(due, key=lambda timer: timer.fire_at):
                await tx.timers.delete(timer.id)
                await self._firings.fire(
                    tx, Firing(id=timer.id, chat_key=timer.chat_key, text=timer.description)
                )
        return len(due)


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
