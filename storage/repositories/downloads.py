"""Downloads: at most one per target across the fleet, with progress for other callers that want the file.

The newest download to a target is a row. It runs while its lease is held; when its worker dies, the
next caller acquires the lease and resumes from the data on disk.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import delete, select, update

from nekro_agent.errors import FencedError
from storage.repositories.base import Repository
from storage.repositories.leases import LeaseTable, is_free, is_held_by, take_values
from storage.sql import insert, now, seconds_from_now
from storage.tables import DOWNLOADS

__all__ = ["DOWNLOAD_CLAIMS", "DownloadRecord", "DownloadRepository"]


@dataclass(frozen=True, kw_only=True)
class DownloadRecord:
    """The newest download to a target."""

    #: Path of the file; relative if it is below the data directory.
    target: str
    #: The parameters that determine the outcome; see ``nekro_agent.ports.DownloadStatus``.
    request: str
    fence: int
    owner: str | None
    lease_until: datetime | None
    done_bytes: int
    whole_bytes: int | None
    #: How it ended; None while it runs and when its worker died or abandoned it.
    report: dict[str, Any] | None
    updated_at: datetime


class DownloadRepository(Repository):
    """Rows of downloads, one per target."""

    async def find(self, target: str) -> DownloadRecord | None:
        """Return the newest download to a target, or None."""
        statement = select(DOWNLOADS).where(DOWNLOADS.c.digest == _digest(target))
        return await self._one_or_none(DownloadRecord, statement)

    async def claim(
        self, target: str, *, request: str, owner: str, lease_seconds: float
    ) -> tuple[int, DownloadRecord | None] | None:
        """Claim a target; None when its lease is held. Must run in a transaction.

        Returns the fencing token and the previous download, if any.
        """
        locked = select(DOWNLOADS).where(DOWNLOADS.c.digest == _digest(target)).with_for_update()
        previous = await self._one_or_none(DownloadRecord, locked)
        new = insert(self._dialect, DOWNLOADS).values(
            digest=_digest(target),
            target=target,
            request=request,
            owner=owner,
            lease_until=seconds_from_now(lease_seconds),
            fence=1,
            done_bytes=0,
            updated_at=now(),
        )
        values = take_values(DOWNLOADS, owner=owner, lease_seconds=lease_seconds)
        statement = new.on_conflict_do_update(
            index_elements=[DOWNLOADS.c.digest],
            set_={**values, "request": request, "report": None, "updated_at": now()},
            where=is_free(DOWNLOADS.c.lease_until),
        ).returning(DOWNLOADS.c.fence)
        fence = await self._scalar(statement)
        return None if fence is None else (fence, previous)

    async def progress(self, target: str, *, fence: int, done_bytes: int, whole_bytes: int | None) -> None:
        """Record the progress of a download.

        Raises:
            FencedError: another holder has the claim.
        """
        values = {"done_bytes": done_bytes, "whole_bytes": whole_bytes, "updated_at": now()}
        await self._write(target, fence, values)

    async def end(self, target: str, *, fence: int, report: dict[str, Any] | None) -> None:
        """Release a claim and record the outcome; a report of None means that the download can be resumed.

        Raises:
            FencedError: another holder has the claim.
        """
        await self._write(
            target, fence, {"report": report, "owner": None, "lease_until": None, "updated_at": now()}
        )

    async def idle(self, *, idle_seconds: float, limit: int) -> list[DownloadRecord]:
        """List downloads that have been inactive for ``idle_seconds``, oldest first."""
        statement = (
            select(DOWNLOADS)
            .where(is_free(DOWNLOADS.c.lease_until), DOWNLOADS.c.updated_at < seconds_from_now(-idle_seconds))
            .order_by(DOWNLOADS.c.updated_at)
            .limit(limit)
        )
        return await self._all(DownloadRecord, statement)

    async def forget(self, record: DownloadRecord) -> bool:
        """Delete a row, unless the target was claimed meanwhile; returns whether it was deleted."""
        statement = delete(DOWNLOADS).where(
            DOWNLOADS.c.digest == _digest(record.target),
            DOWNLOADS.c.fence == record.fence,
            is_free(DOWNLOADS.c.lease_until),
        )
        return await self._count(statement) > 0

    async def _write(self, target: str, fence: int, values: dict[str, Any]) -> None:
        statement = (
            update(DOWNLOADS)
            .where(DOWNLOADS.c.digest == _digest(target), is_held_by(DOWNLOADS, fence))
            .values(**values)
        )
        if await self._count(statement) == 0:
            raise FencedError(f"the download to {target!r} passed to another worker")


def _digest(target: str) -> bytes:
    """Return the key of a target; a path itself may be too long for an index entry."""
    return hashlib.sha256(target.encode("utf-8", "surrogateescape")).digest()


DOWNLOAD_CLAIMS: Final = LeaseTable(
    key=DOWNLOADS.c.digest,
    fence=DOWNLOADS.c.fence,
    is_live=DOWNLOADS.c.lease_until.is_not(None),
    key_of=_digest,
)
