"""Sweeps other than that of rounds and calls: timers, jobs without a worker, old rows and files."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger

from broker_config.settings import AgentSettings, RetentionSettings
from nekro.app.approvals.decisions import ApprovalDecisions
from nekro.app.calls.waits import ProgramWaits, job_ended
from nekro.app.chats.publisher import EventPublisher
from nekro.app.chats.writer import TimerFirings
from nekro.app.jobs import notify_chat_of_failure
from nekro.base.metrics import metrics
from nekro.sandbox.shared import IDLE_SWEEPS
from nekro_agent import cron
from nekro_agent.durations import STALE_SECONDS
from nekro_agent.errors import InvalidValueError
from nekro_agent.files.uploads import remove_expired
from nekro_agent.ports import CronJob, JobState
from nekro_agent.shared_clock import shared_time
from storage.engine import Database
from storage.retention import delete_expired
from storage.timer_services import fire_due

if TYPE_CHECKING:
    from nekro.app.background import BackgroundLoop
    from storage.files.collection import Collected
    from storage.files.stores.store import ObjectStore

__all__ = [
    "ApprovalSweep",
    "CollectionSweep",
    "JobSweep",
    "RetentionSweep",
    "StoredFileSweep",
    "TimerSweep",
    "UploadSweep",
    "WaitSweep",
]

#: Most rows that one sweep takes of each kind; the next sweep takes the rest.
_BATCH: Final = 500
#: Most requests for approval of a chat that expire in one transaction, which holds the chat's lock.
_EXPIRING_BATCH: Final = 100
#: Most uploaded files that one sweep removes.
_UPLOADS_BATCH: Final = 5_000
#: How often the sweep checks for expired rows and files: retention is counted in days.
_RETENTION_SECONDS: Final = 3600.0
_COLLECTIONS_PER_GRACE: Final = 4
#: After how many lease times the message of a queued job may be lost.
_QUEUED_LEASES: Final = 4


class TimerSweep:
    """Fires due timers; several processes may do so concurrently."""

    def __init__(self, database: Database, firings: TimerFirings) -> None:
        self._database = database
        self._firings = firings

    async def sweep(self) -> float | None:
        """Fire what is due; returns the seconds until the next timer, None if none is scheduled."""
        fired = await fire_due(
            self._database, on_fire=self._firings.fire, next_fire_at=_next_fire_at, limit=_BATCH
        )
        if fired:
            logger.bind(timers=fired).info("timers_fired")
        async with self._database.read() as transaction:
            pauses = (
                await transaction.timers.seconds_until_next(),
                await transaction.cron_jobs.seconds_until_next(),
            )
        return min((seconds for seconds in pauses if seconds is not None), default=None)


def _next_fire_at(job: CronJob) -> datetime | None:
    # After now and after this firing: one firing makes up for all times that passed without a sweep.
    now = shared_time()
    after = max(now, job.next_fire_at or now)
    try:
        return cron.next_fire(
            job.cron_expr, timezone=job.timezone, workday_mode=job.workday_mode, after=after
        )
    except InvalidValueError as exc:
        logger.bind(job_id=job.job_id, error=str(exc)).error("recurring_timer_paused")
        return None


class RetentionSweep:
    """Deletes expired rows once an hour."""

    def __init__(self, database: Database, settings: RetentionSettings) -> None:
        self._database = database
        self._settings = settings
        self._next_at = time.monotonic()

    async def sweep(self) -> float | None:
        """Delete what is due; returns the seconds until the next check."""
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + _RETENTION_SECONDS
            deleted = await delete_expired(self._database, self._settings)
            if any(deleted.values()):
                logger.bind(**deleted).info("expired_rows_deleted")
        return self._next_at - time.monotonic()


class UploadSweep:
    """Removes uploaded files that have been unchanged for the retention time, once an hour."""

    def __init__(self, settings: RetentionSettings, *, data_dir: Path) -> None:
        self._keep_seconds = timedelta(days=settings.uploads_days).total_seconds()
        self._data_dir = data_dir
        self._next_at = time.monotonic()

    async def sweep(self) -> float | None:
        """Remove what is due, at most 5,000 names at a time; returns the seconds until the next sweep."""
        if time.monotonic() >= self._next_at:
            now = time.time()
            removed = await asyncio.to_thread(
                remove_expired,
                self._data_dir,
                before=now - self._keep_seconds if self._keep_seconds else None,
                unfinished_before=now - STALE_SECONDS,
                limit=_UPLOADS_BATCH,
            )
            if removed < _UPLOADS_BATCH:
                self._next_at = time.monotonic() + _RETENTION_SECONDS
            if removed:
                logger.bind(names=removed).info("expired_uploads_removed")
        return max(self._next_at - time.monotonic(), 0)


class StoredFileSweep:
    """Ends old uploads once an hour, and empties idle shared areas, where files are in a store."""

    def __init__(self, database: Database, settings: RetentionSettings, *, idle_seconds: float) -> None:
        """
        Args:
            idle_seconds: as ``SandboxLimits.shared_idle_seconds``.
        """
        self._database = database
        self._idle_seconds = idle_seconds
        self._keep_seconds = timedelta(days=settings.uploads_days).total_seconds()
        never = math.inf
        self._uploads_at = time.monotonic() if self._keep_seconds else never
        self._shared_at = time.monotonic() if idle_seconds else never

    async def sweep(self) -> float | None:
        """Do what is due; returns the seconds until the next sweep, None if there is none."""
        from storage.files.expiry import empty_idle_areas, end_old_uploads

        if time.monotonic() >= self._uploads_at:
            chats = await end_old_uploads(self._database, seconds=self._keep_seconds, limit=_BATCH)
            if chats < _BATCH:
                self._uploads_at = time.monotonic() + _RETENTION_SECONDS
            if chats:
                logger.bind(chats=chats).info("expired_uploads_removed")
        if time.monotonic() >= self._shared_at:
            areas = await empty_idle_areas(self._database, seconds=self._idle_seconds, limit=_BATCH)
            if areas < _BATCH:
                self._shared_at = time.monotonic() + self._idle_seconds / IDLE_SWEEPS
            if areas:
                logger.bind(count=areas).info("sandbox_shared_emptied")
        pause = min(self._uploads_at, self._shared_at) - time.monotonic()
        return None if math.isinf(pause) else max(pause, 0)


class CollectionSweep:
    """Deletes contents from the store of files that no file has, several times in their grace time.

    A collection lists the whole store, so it runs beside the other sweeps, on the background loop.
    """

    def __init__(self, database: Database, background: BackgroundLoop, store: ObjectStore) -> None:
        self._database = database
        self._background = background
        self._store = store
        self._next_at = time.monotonic()
        self._running: Future[Collected] | None = None

    async def sweep(self) -> float | None:
        """Begin what is due, or report what has ended; None while a collection runs."""
        if self._running is not None:
            if not self._running.done():
                return None
            ended, self._running = self._running, None
            self._report(ended.result())
        if time.monotonic() >= self._next_at:
            from storage.files.collection import GRACE, collect

            self._next_at = time.monotonic() + GRACE.total_seconds() / _COLLECTIONS_PER_GRACE
            self._running = self._background.submit(collect(self._database, self._store))
            return None
        return self._next_at - time.monotonic()

    def _report(self, done: Collected) -> None:
        for kind, number in (
            ("contents", done.contents),
            ("objects", done.orphans),
            ("bytes", done.bytes),
        ):
            metrics().files_collected.labels(kind).inc(number)
        if done.contents or done.orphans:
            logger.bind(contents=done.contents, bytes=done.bytes, orphans=done.orphans).info(
                "file_contents_collected"
            )
        if done.is_refused:
            logger.error("store_of_several_installations")
        if done.foreign:
            logger.bind(objects=done.foreign).warning("foreign_objects_left")


class ApprovalSweep:
    """Ends expired requests for approval."""

    def __init__(self, database: Database, decisions: ApprovalDecisions) -> None:
        self._database = database
        self._decisions = decisions

    async def sweep(self) -> float | None:
        """End what is overdue, in small transactions; returns the seconds until the next is, None if none."""
        async with self._database.read() as transaction:
            chats = await transaction.approvals.overdue_chats(limit=_BATCH)
        expired = 0
        for chat_key in chats:
            expired += await self._decisions.expire(chat_key, limit=_EXPIRING_BATCH)
        if expired:
            logger.bind(approvals=expired).info("approvals_expired")
        async with self._database.read() as transaction:
            return await transaction.approvals.seconds_until_overdue()


class WaitSweep:
    """Ends the waits of programs whose time has come."""

    def __init__(self, database: Database, waits: ProgramWaits) -> None:
        self._database = database
        self._waits = waits

    async def sweep(self) -> float | None:
        """End what is due; returns the seconds until the next is, None if none."""
        ended = await self._waits.end_due(limit=_BATCH)
        if ended:
            logger.bind(waits=ended).info("waits_ended")
        async with self._database.read() as transaction:
            return await transaction.parked_programs.seconds_until_due()


class JobSweep:
    """Sends jobs without a worker again, and ends those that must not restart."""

    def __init__(
        self,
        database: Database,
        publisher: EventPublisher,
        settings: AgentSettings,
        *,
        queue_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """
        Args:
            queue_of: the queue of the one process that runs the jobs of a plugin; None: lane ``long`` does.
        """
        self._database = database
        self._publisher = publisher
        self._lease_seconds = settings.lease_seconds
        self._queue_of = queue_of

    async def sweep(self) -> float | None:
        """End jobs that must not restart, then publish the others; None: the time of the next is unknown.

        Jobs may be queued for hours, so a message is sent again only if one is missing: otherwise the copies
        would fill the queue.
        """
        for _ in range(_BATCH):
            if not await self._end_one():
                break
        async with self._database.begin() as transaction:
            lost = await transaction.jobs.take_orphans(
                waiting_seconds=self._lease_seconds,
                queued_seconds=_QUEUED_LEASES * self._lease_seconds,
                limit=_BATCH,
            )
            queued = await transaction.jobs.count_queued()
        for job in lost:
            if job.state is JobState.RUNNING:
                logger.bind(job_id=job.id, job_type=job.type, attempt=job.attempt).warning("job_sent_again")
                await self._publisher.job_queued(job.id, job.chat_key)
        overdue = [job for job in lost if job.state is JobState.QUEUED]
        owned = {self._queue_of(job.plugin_key) for job in overdue} - {None}
        if overdue and (
            sent := await self._publisher.jobs_overdue(
                overdue, queued=queued, owned=sorted(filter(None, owned))
            )
        ):
            logger.bind(queued=queued, sent=sent).warning("queued_jobs_sent_again")
        return None

    async def _end_one(self) -> bool:
        """End one job, and inform its chat in the same transaction; False when there is none."""
        async with self._database.begin() as transaction:
            for job in await transaction.jobs.fail_orphans(limit=1):
                logger.bind(job_id=job.id, job_type=job.type, reason=job.message).warning("job_lost")
                await transaction.job_signals.clear(job.id)
                is_awaited = await job_ended(transaction, self._publisher, job)
                if not (job.is_call or is_awaited):
                    await notify_chat_of_failure(transaction, self._publisher, job)
                return True
        return False
