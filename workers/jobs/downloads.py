"""One download per target in the whole fleet: the SDK's ``Downloads`` port on database rows."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Final

from loguru import logger

from nekro_agent.downloads.part import remove_unfinished
from nekro_agent.durations import REFRESH_SECONDS, RETRY_SECONDS, STALE_SECONDS
from nekro_agent.errors import FencedError, StorageError
from nekro_agent.ports import DownloadReport, DownloadStatus
from runtime.completion import complete
from storage.engine import Database
from storage.repositories.downloads import DownloadRecord
from workers.leases.keeping import report_loss, survived
from workers.pools.background import BackgroundLoop

__all__ = ["DownloadSweep", "SqlDownloads"]

#: Number of attempts to record the end while the database is unavailable, and the pause between them.
_END_TRIES: Final = 20
_BATCH: Final = 100


class SqlDownloads:
    """Implements ``nekro_agent.ports.Downloads``; one instance per process.

    Claims are renewed on the background loop, so a plugin that blocks its own loop keeps them.
    """

    def __init__(
        self,
        database: Database,
        background: BackgroundLoop,
        *,
        data_dir: Path,
        owner: str,
        lease_seconds: float,
    ) -> None:
        self._database = database
        self._background = background
        self._data_dir = data_dir
        self._owner = owner
        self._lease_seconds = lease_seconds

    async def claim(self, target: Path, *, request: str) -> SqlDownloadClaim | None:
        """Claim the download to ``target``; None when another download holds the claim."""
        name = self._name(target)
        claimed_at = time.monotonic()
        async with self._database.begin() as transaction:
            granted = await transaction.downloads.claim(
                name, request=request, owner=self._owner, lease_seconds=self._lease_seconds
            )
        if granted is None:
            return None
        fence, previous = granted
        claim = SqlDownloadClaim(
            self._database,
            target=name,
            fence=fence,
            previous=None if previous is None else _status(previous),
            lease_seconds=self._lease_seconds,
            held_until=claimed_at + self._lease_seconds,
        )
        claim.start(self._background)
        return claim

    async def status(self, target: Path) -> DownloadStatus | None:
        """Return the progress of the download to ``target``, or its end; None if there is none."""
        async with self._database.read() as transaction:
            record = await transaction.downloads.find(self._name(target))
        return None if record is None else _status(record)

    def _name(self, target: Path) -> str:
        # Hosts of a fleet may mount the shared volume at different places.
        is_below = target.is_relative_to(self._data_dir)
        return str(target.relative_to(self._data_dir) if is_below else target)


class SqlDownloadClaim:
    """Implements ``nekro_agent.ports.DownloadClaim``."""

    def __init__(
        self,
        database: Database,
        *,
        target: str,
        fence: int,
        previous: DownloadStatus | None,
        lease_seconds: float,
        held_until: float,
    ) -> None:
        self.previous = previous
        self._database = database
        self._target = target
        self._fence = fence
        self._lease_seconds = lease_seconds
        #: On this process's monotonic clock, measured before the request: ends no later than the row's.
        self._held_until = held_until
        self._progress: tuple[int, int | None] = (0, None)
        self._keeper: Future[None] | None = None

    def start(self, background: BackgroundLoop) -> None:
        """Start renewing the claim."""
        self._keeper = background.submit(self._keep())

    @property
    def is_lost(self) -> bool:
        """Whether the claim passed to another owner, or may have because this process was suspended."""
        return time.monotonic() >= self._held_until

    def progress(self, done_bytes: int, whole_bytes: int | None) -> None:
        """Publish the progress."""
        self._progress = (done_bytes, whole_bytes)

    async def confirm(self) -> None:
        """Verify the claim.

        Raises:
            FencedError: the claim passed to another owner.
        """
        await self._write()

    async def end(self, report: DownloadReport | None) -> None:
        """Release the claim; no effect if another owner has it."""
        await complete(self._end(report))

    async def _end(self, report: DownloadReport | None) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        values = None if report is None else asdict(report)
        for _ in range(_END_TRIES):
            try:
                async with self._database.autocommit() as transaction:
                    await transaction.downloads.end(self._target, fence=self._fence, report=values)
                return
            except FencedError:
                return
            except StorageError as exc:
                logger.bind(target=self._target, error=str(exc)).warning("download_end_not_recorded")
            await asyncio.sleep(RETRY_SECONDS)

    async def _keep(self) -> None:
        written, kept_at = self._progress, time.monotonic()
        while self._held_until > 0:
            await asyncio.sleep(min(REFRESH_SECONDS, self._lease_seconds / 3))
            if self._progress == written and time.monotonic() < kept_at + self._lease_seconds / 3:
                continue
            written, kept_at = self._progress, time.monotonic()
            # The claim may survive an error; ``is_lost`` becomes true when its time is over.
            with survived("download_claim_not_kept", target=self._target):
                await self._renew()

    async def _renew(self) -> None:
        try:
            await self._write()
        except FencedError:
            self._held_until = 0.0
            report_loss("download", target=self._target, fence=self._fence)

    async def _write(self) -> None:
        began, (done_bytes, whole_bytes) = time.monotonic(), self._progress
        async with self._database.autocommit() as transaction:
            await transaction.downloads.keep(
                self._target,
                fence=self._fence,
                lease_seconds=self._lease_seconds,
                done_bytes=done_bytes,
                whole_bytes=whole_bytes,
            )
        self._held_until = began + self._lease_seconds


class DownloadSweep:
    """Removes unfinished files of abandoned downloads, and rows of ended downloads."""

    def __init__(self, database: Database, *, data_dir: Path, keep_seconds: float = STALE_SECONDS) -> None:
        self._database = database
        self._keep_seconds = keep_seconds
        self._data_dir = data_dir

    async def sweep(self) -> float | None:
        """Remove what is due; always returns None, because the time of the next work is unknown."""
        async with self._database.read() as transaction:
            idle = await transaction.downloads.idle(idle_seconds=self._keep_seconds, limit=_BATCH)
        for record in idle:
            async with self._database.autocommit() as transaction:
                is_ours = await transaction.downloads.forget(record)
            if is_ours and record.report is None:
                # A download that starts now finds no file, or loses it and fails with a retryable error.
                await asyncio.to_thread(remove_unfinished, self._data_dir / record.target)
                logger.bind(target=record.target).info("unfinished_download_removed")
        return None


def _status(record: DownloadRecord) -> DownloadStatus:
    return DownloadStatus(
        request=record.request,
        fence=record.fence,
        done_bytes=record.done_bytes,
        whole_bytes=record.whole_bytes,
        report=None if record.report is None else DownloadReport(**record.report),
    )
