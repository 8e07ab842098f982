"""Progress of running work: published to Celery for jobs and calls, recorded as rows for calls.

Jobs write their own rows (``workers.jobs.running``). A method's call gets a row with its first report,
so that ``nekro jobs`` lists it beside the jobs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from celery import Celery
from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.app.calls.detached import longest_seconds
from nekro.app.chats.events import live_event
from nekro.app.chats.publisher import EventPublisher
from nekro.plugins.entries import MethodEntry
from nekro.wire.invocation import Invocation
from nekro_agent.durations import REFRESH_SECONDS, RETRY_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.ports import JobState
from nekro_client.event_types import EventType
from storage.engine import Database
from storage.repositories.call_progress import CallProgress

__all__ = ["CallReports", "ProgressAnnouncer"]


class ProgressAnnouncer:
    """Publishes state ``PROGRESS`` to the result backend and an event for Flower. Never blocks or raises."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[int, str]] = {}
        #: Name of this worker in events.
        self.hostname: str | None = None

    def announce(self, task_id: str, percent: int, message: str) -> None:
        """Publish a task's progress; of several pending reports only the newest is sent."""
        with self._lock:
            waits = task_id in self._latest
            self._latest[task_id] = (percent, message)
        if not waits:
            try:
                self._pool.submit(self._send, task_id)
            except RuntimeError:  # the process is stopping; the row has the progress
                self._latest.pop(task_id, None)

    async def settled(self) -> None:
        """Wait until all announced reports are sent, so that none follows the task's end."""
        await asyncio.get_running_loop().run_in_executor(self._pool, lambda: None)

    def close(self) -> None:
        """Stop sending."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, task_id: str) -> None:
        with self._lock:
            percent, message = self._latest.pop(task_id)
        try:
            self._app.backend.store_progress(task_id, {"percent": percent, "message": message})
            with self._app.events.default_dispatcher(hostname=self.hostname) as dispatcher:
                # Flower shows no custom fields, but it shows a result of an unfinished task too.
                dispatcher.send("task-progress", uuid=task_id, percent=percent, result=f"{percent} %")
        except Exception as exc:  # the row has the progress, and the next report will be sent
            logger.bind(task_id=task_id, error=type(exc).__name__).debug("progress_not_announced")


@dataclass(frozen=True, kw_only=True)
class _Report:
    progress: CallProgress
    #: None while the call runs.
    end: JobState | None = None


class _Following:
    """The reports of one call; a class, because a generator per waiting call would take more memory."""

    __slots__ = ("_entry", "_invocation", "_newest", "_reports")

    def __init__(self, reports: CallReports, entry: MethodEntry, invocation: Invocation) -> None:
        self._reports, self._entry, self._invocation = reports, entry, invocation
        self._newest: CallProgress | None = None

    def __enter__(self) -> Callable[[float, str], None]:
        return self._on_progress

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        newest = self._newest
        if newest is None:
            return
        if kind is None:
            self._reports.put(_Report(progress=replace(newest, percent=100), end=JobState.SUCCEEDED))
        else:
            self._reports.put(_Report(progress=newest, end=JobState.FAILED))

    def _on_progress(self, percent: float, message: str) -> None:
        entry, invocation = self._entry, self._invocation
        self._newest = CallProgress(
            call_id=invocation.call_id,
            method=entry.name,
            plugin_key=entry.plugin_key,
            chat_key=invocation.chat_key,
            worker=self._reports.worker_name,
            percent=round(percent),
            message=message,
            lease_seconds=longest_seconds(invocation),
            round_id=invocation.round_id,
            turn_id=invocation.turn_id,
        )
        self._reports.put(_Report(progress=self._newest))


class CallReports:
    """Rows of calls that report progress; one writer for all calls of the process."""

    def __init__(
        self,
        database: Database,
        background: BackgroundLoop,
        announcer: ProgressAnnouncer,
        publisher: EventPublisher,
        *,
        worker_name: str,
    ) -> None:
        self._publisher = publisher
        self._database = database
        self._background = background
        self._announcer = announcer
        self._worker_name = worker_name
        self._lock = threading.Lock()
        self._latest: dict[str, _Report] = {}
        self._is_writing = False

    @property
    def worker_name(self) -> str:
        """Name of the worker that runs the calls."""
        return self._worker_name

    def following(
        self, entry: MethodEntry, invocation: Invocation
    ) -> AbstractContextManager[Callable[[float, str], None]]:
        """Return the callback for ``AgentCtx.report_progress``, thread-safe; the row ends with the block."""
        return _Following(self, entry, invocation)

    def put(self, report: _Report) -> None:
        """Schedule a report for writing."""
        with self._lock:
            self._latest[report.progress.call_id] = report
            begins, self._is_writing = not self._is_writing, True
        if begins:
            self._background.submit(self._write_until_none_is_left())

    async def _write_until_none_is_left(self) -> None:
        while True:
            with self._lock:
                reports, self._latest = self._latest, {}
                if not reports:
                    self._is_writing = False
                    return
            try:
                await self._write(list(reports.values()))
            except StorageError as exc:
                logger.bind(error=str(exc), calls=len(reports)).warning("call_progress_not_written")
                with self._lock:
                    self._latest = reports | self._latest
                await asyncio.sleep(RETRY_SECONDS)
            except Exception:  # it would fail again, and without the writer no call could report
                logger.bind(calls=len(reports)).exception("call_progress_lost")
            await asyncio.sleep(REFRESH_SECONDS)

    async def _write(self, reports: list[_Report]) -> None:
        for report in reports:
            progress = report.progress
            async with self._database.begin() as transaction:
                if report.end is None:
                    await transaction.call_progress.show(progress)
                else:
                    await transaction.call_progress.end(progress, state=report.end)
            if report.end is None:
                self._announcer.announce(progress.call_id, progress.percent, progress.message)
                self._publisher.live(progress.chat_key, _live(progress))


def _live(progress: CallProgress) -> dict[str, Any]:
    return live_event(
        EventType.CALL_PROGRESS,
        {"percent": progress.percent, "message": progress.message},
        turn_id=progress.turn_id,
        round_id=progress.round_id,
        call_id=progress.call_id,
    )
