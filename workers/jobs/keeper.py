"""Maintains a running job's claim: heartbeat, progress reports, and checks for a request to stop.

Runs on the background loop, so a job that blocks its own thread keeps its claim and its progress.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nekro_agent.errors import FencedError
from nekro_agent.jobs import TaskCtl
from storage.engine import Database
from storage.repositories.jobs import Job
from workers.jobs.data import plain_data
from workers.leases.keeping import report_loss, survived
from workers.pools.background import BackgroundLoop

__all__ = ["JobKeeper", "KeeperSettings", "StopCause"]


class StopCause(StrEnum):
    """Why a running job must stop."""

    #: A stop was requested.
    CANCELLED = "cancelled"
    #: The claim passed to another worker; further writes by this worker are refused.
    LOST = "lost"


@dataclass(frozen=True, kw_only=True)
class KeeperSettings:
    """Settings and services that all keepers of a process share."""

    database: Database
    background: BackgroundLoop
    lease_seconds: float
    #: Called with job id, percent and message of each written report; must neither block nor raise.
    announce: Callable[[str, int, str], object]
    #: How often a running job is checked for a request to stop and its progress is written.
    look_seconds: float = 0.5


class JobKeeper:
    """Maintains the claim of one job for an ``async with`` block.

    ``stop`` is called once, on the background loop, when the job must stop.
    """

    def __init__(self, settings: KeeperSettings, job: Job, *, stop: Callable[[StopCause], None]) -> None:
        self._settings = settings
        self._job = job
        self._stop = stop
        #: The newest unwritten report.
        self._latest: deque[TaskCtl] = deque(maxlen=1)
        self._future: Future[None] | None = None
        self._is_over = False
        self._is_lost = False
        self.cause: StopCause | None = None

    async def __aenter__(self) -> JobKeeper:
        self._future = self._settings.background.submit(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._future is not None  # noqa: S101 - entered
        self._is_over = True
        self._future.cancel()

    async def report(self, signal: TaskCtl) -> None:
        """Schedule a report for writing; a newer report replaces it, so any rate of reports is allowed."""
        self._latest.append(signal)

    async def _keep(self) -> None:
        lease_seconds = self._settings.lease_seconds
        beat_at = time.monotonic() + lease_seconds / 3
        while not self._is_lost:
            await asyncio.sleep(min(self._settings.look_seconds, lease_seconds / 3))
            # The claim may survive an error; if it does not, the next write is refused.
            with survived("job_claim_not_renewed", job_id=self._job.id):
                is_due = time.monotonic() >= beat_at
                await self._check(is_due=is_due)
                if is_due:
                    beat_at = time.monotonic() + lease_seconds / 3

    async def _check(self, *, is_due: bool) -> None:
        try:
            job = await self._look(is_due=is_due)
        except FencedError:
            self._end(StopCause.LOST)
            return
        if job.cancel_requested_at is not None:
            self._end(StopCause.CANCELLED)

    async def _look(self, *, is_due: bool) -> Job:
        if self._latest:
            return await self._write(self._latest.pop())
        if is_due:
            async with self._settings.database.autocommit() as transaction:
                return await transaction.jobs.heartbeat(
                    self._job.id, fence=self._job.fence, lease_seconds=self._settings.lease_seconds
                )
        async with self._settings.database.read() as transaction:
            job = await transaction.jobs.get(self._job.id)
        if job.fence != self._job.fence or job.state.is_final:
            raise FencedError(f"job {job.id} does not run under claim {self._job.fence} any more")
        return job

    async def _write(self, report: TaskCtl) -> Job:
        percent: int = self._job.percent if report.progress is None else report.progress
        data: Any = plain_data(report.data)
        async with self._settings.database.autocommit() as transaction:
            job = await transaction.jobs.progress(
                self._job.id,
                fence=self._job.fence,
                lease_seconds=self._settings.lease_seconds,
                percent=percent,
                message=report.message,
                data=data,
            )
        if not self._is_over:
            self._settings.announce(self._job.id, job.percent, job.message)
        return job

    def _end(self, cause: StopCause) -> None:
        if cause is StopCause.LOST:
            self._is_lost = True
            report_loss("job", job_id=self._job.id, fence=self._job.fence)
        if self.cause is None:
            self.cause = cause
            self._stop(cause)
