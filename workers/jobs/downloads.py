"""One download per target in the whole fleet: the SDK's ``Downloads`` port on database rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from loguru import logger

from nekro.app.background import BackgroundLoop, Poll
from nekro.app.leases import DOWNLOAD, HeldLease, LeaseKeeper
from nekro.app.retried_writes import write_with_retries
from nekro.base.plain import known_fields
from nekro.base.tasks import complete, log_errors
from nekro_agent.downloads.part import remove_unfinished
from nekro_agent.durations import GRACE_SECONDS, REFRESH_SECONDS, STALE_SECONDS
from nekro_agent.errors import FencedError, StorageError
from nekro_agent.ports import DownloadReport, DownloadStatus
from nekro_agent.shared_clock import elapsed_seconds
from storage.driver.errors import outlasting
from storage.engine import Database
from storage.repositories.leases import DownloadRecord
from storage.transaction import Transaction

if TYPE_CHECKING:
    from storage.files.host_files import HostFiles
    from workers.jobs.stored_parts import StoredParts

__all__ = ["DownloadSweep", "SqlDownloads"]

_BATCH: Final = 100


class SqlDownloads:
    """Implements ``nekro_agent.ports.Downloads``; one instance per process."""

    def __init__(
        self,
        leases: LeaseKeeper,
        background: BackgroundLoop,
        *,
        data_dir: Path,
        owner: str,
        lease_seconds: float,
        files: Callable[[], HostFiles] | None = None,
    ) -> None:
        """
        Args:
            files: for the contents of downloads; None: all hosts share a disk.
        """
        self._background = background
        self._files = files
        self._leases = leases
        self._database = leases.database
        self._data_dir = data_dir
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._running: set[SqlDownloadClaim] = set()
        self._poll = Poll(
            background,
            self._write_progress,
            seconds=REFRESH_SECONDS,
            is_needed=lambda: bool(self._running),
            on_error="download_progress_not_written",
        )

    @outlasting
    async def claim(self, target: Path, *, request: str) -> SqlDownloadClaim | None:
        """Claim the download to ``target``; None when another download holds the claim."""
        name = self._name(target)
        claimed_at = elapsed_seconds()
        async with self._database.begin() as transaction:
            granted = await transaction.downloads.claim(
                name, request=request, owner=self._owner, lease_seconds=self._lease_seconds
            )
        if granted is None:
            return None
        fence, previous = granted
        lease = self._leases.hold(DOWNLOAD, name, fence, seconds=self._lease_seconds, since=claimed_at)
        claim = SqlDownloadClaim(
            self._database,
            lease,
            previous=None if previous is None else _status(previous),
            on_end=self._running.discard,
            parts=self._parts(name, fence),
        )
        self._running.add(claim)
        self._poll.start()
        return claim

    @outlasting
    async def status(self, target: Path) -> DownloadStatus | None:
        """Return the progress of the download to ``target``, or its end; None if there is none."""
        async with self._database.read() as transaction:
            record = await transaction.downloads.find(self._name(target))
        return None if record is None else _status(record)

    def _parts(self, name: str, fence: int) -> StoredParts | None:
        if self._files is None:
            return None
        from workers.jobs.stored_parts import StoredParts  # with the client of the store

        return StoredParts(self._database, self._files(), self._background, target=name, fence=fence)

    def _name(self, target: Path) -> str:
        # Hosts of a fleet may mount the shared volume at different places.
        is_below = target.is_relative_to(self._data_dir)
        return str(target.relative_to(self._data_dir) if is_below else target)

    async def _write_progress(self) -> None:
        for claim in list(self._running):
            with log_errors("download_progress_not_written", target=claim.target):
                await claim.write_progress()


class SqlDownloadClaim:
    """Implements ``nekro_agent.ports.DownloadClaim``."""

    def __init__(
        self,
        database: Database,
        lease: HeldLease,
        *,
        previous: DownloadStatus | None,
        on_end: Callable[[SqlDownloadClaim], object],
        parts: StoredParts | None = None,
    ) -> None:
        self.parts = parts
        self.previous = previous
        self.target = lease.key
        self.fence = lease.fence
        self._database = database
        self._lease = lease
        self._on_end = on_end
        self._progress: tuple[int, int | None] = (0, None)
        self._written: tuple[int, int | None] = self._progress

    @property
    def is_lost(self) -> bool:
        """Whether the claim passed to another owner, or may have because it was not renewed in time."""
        return self._lease.is_lost

    def progress(self, done_bytes: int, whole_bytes: int | None) -> None:
        """Publish the progress."""
        self._progress = (done_bytes, whole_bytes)

    @outlasting
    async def confirm(self) -> None:
        """Verify the claim.

        Raises:
            FencedError: the claim passed to another owner.
        """
        await self._lease.confirm()

    async def write_progress(self) -> None:
        """Write the progress if it has changed."""
        done_bytes, whole_bytes = progress = self._progress
        if progress == self._written or self.is_lost:
            return
        try:
            async with self._database.autocommit() as transaction:
                await transaction.downloads.progress(
                    self.target, fence=self.fence, done_bytes=done_bytes, whole_bytes=whole_bytes
                )
        except FencedError:
            self._lease.lose()
        self._written = progress

    async def end(self, report: DownloadReport | None) -> None:
        """Release the claim; no effect if another owner has it."""
        self._on_end(self)
        self._lease.drop()
        await complete(self._end(report))

    async def _end(self, report: DownloadReport | None) -> None:
        values = None if report is None else asdict(report)

        parts = None if report is None or report.error is not None else self.parts

        async def write(transaction: Transaction) -> None:
            await transaction.downloads.end(self.target, fence=self.fence, report=values)
            if parts is not None:
                await parts.record(transaction)

        begin = self._database.autocommit if parts is None else self._database.begin
        try:
            await write_with_retries(begin, write, unknown=None, seconds=2 * GRACE_SECONDS)
        except FencedError:
            return
        except StorageError as exc:
            logger.bind(target=self.target, error=str(exc)).warning("download_end_not_recorded")


class DownloadSweep:
    """Removes unfinished files of abandoned downloads, and rows of ended downloads."""

    def __init__(
        self,
        database: Database,
        *,
        data_dir: Path,
        keep_seconds: float = STALE_SECONDS,
        in_store: bool = False,
    ) -> None:
        self._in_store = in_store
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
            if is_ours and self._in_store:
                await self._empty(record.target)
            if is_ours and record.report is None:
                # A download that starts now finds no file, or loses it and fails with a retryable error.
                await asyncio.to_thread(remove_unfinished, self._data_dir / record.target)
                logger.bind(target=record.target).info("unfinished_download_removed")
        return None

    async def _empty(self, target: str) -> None:
        """Let a collection delete what the store has of a download, unless a file of an area has it."""
        from workers.jobs.stored_parts import area_of

        async with self._database.begin() as transaction:
            area = await transaction.files.find(area_of(target))
            entries = [] if area is None else await transaction.files.entries(area)
            if entries:
                await transaction.files.commit(area_of(target), removed=[entry.path for entry in entries])


def _status(record: DownloadRecord) -> DownloadStatus:
    return DownloadStatus(
        request=record.request,
        fence=record.fence,
        done_bytes=record.done_bytes,
        whole_bytes=record.whole_bytes,
        report=None
        if record.report is None
        else DownloadReport(**known_fields(DownloadReport, record.report)),
    )
