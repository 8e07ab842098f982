"""Writes the catalogue: live workers and the plugins that they serve; ``storage.caller_reads`` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Final

from sqlalchemy import delete, select, update

from nekro_agent.ports import CallbackTimer
from storage.caller_reads import Snapshot
from storage.clock import now, seconds_from_now
from storage.models import PluginSnapshotRow, WorkerPluginRow, WorkerRow, WorkerSiteRow, WorkerTimerRow
from storage.repositories.base import Repository
from storage.repositories.leases import LeaseTable, is_free
from storage.upsert import insert

__all__ = ["WORKER_LEASES", "CatalogueRepository", "NewWorker", "Site"]

WORKER_LEASES: Final = LeaseTable(
    key=WorkerRow.id, fence=WorkerRow.fence, is_live=WorkerRow.lease_until.is_not(None)
)


@dataclass(frozen=True, kw_only=True)
class NewWorker:
    """A worker process that starts to serve plugins."""

    id: str
    name: str
    lane: str
    host: str
    pid: int
    #: Version of this package; None: unknown.
    release: str | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a worker serves the HTTP routes of a plugin."""

    worker_id: str
    #: ``host:port``.
    address: str
    #: Name of the worker's host.
    host: str


class CatalogueRepository(Repository):
    """Rows of workers, of what they serve, and of the plugins' versions."""

    async def enter(self, worker: NewWorker, *, lease_seconds: float) -> int:
        """Add a worker that holds its lease; returns its fencing token. Adding it again renews it."""
        new = insert(self._dialect, WorkerRow).values(
            id=worker.id, name=worker.name, lane=worker.lane, host=worker.host, pid=worker.pid,
            started_at=now(), owner=worker.name, lease_until=seconds_from_now(lease_seconds), fence=1,
            release=worker.release,
        )  # fmt: skip
        statement = new.on_conflict_do_update(
            index_elements=[WorkerRow.id],
            set_={"lease_until": seconds_from_now(lease_seconds), "fence": WorkerRow.fence + 1},
        ).returning(WorkerRow.fence)
        return int(await self._scalar(statement))

    async def leave(self, worker_id: str) -> None:
        """Release a worker's lease: it is not live any more."""
        await self._count(update(WorkerRow).where(WorkerRow.id == worker_id).values(lease_until=None))

    async def serve(self, worker_id: str, snapshots: Sequence[Snapshot]) -> None:
        """Replace what a worker serves; ``snapshots`` are in the order of its plugins."""
        if self._dialect == "postgresql":
            # Another worker would otherwise delete a version that it finds unused, while this one links it.
            await self._connection.exec_driver_sql(
                "LOCK TABLE plugin_snapshots, worker_plugins IN SHARE ROW EXCLUSIVE MODE"
            )
        await self._count(delete(WorkerPluginRow).where(WorkerPluginRow.worker_id == worker_id))
        if not snapshots:
            return
        new = insert(self._dialect, PluginSnapshotRow).values(
            [
                {
                    "digest": one.digest,
                    "plugin_key": one.plugin_key,
                    "entry": one.entry,
                    "published_at": now(),
                }
                for one in {one.digest: one for one in snapshots}.values()
            ]
        )
        await self._rows(new.on_conflict_do_nothing(index_elements=[PluginSnapshotRow.digest]))
        links = [
            {"worker_id": worker_id, "position": position, "digest": one.digest}
            for position, one in enumerate(snapshots)
        ]
        await self._rows(insert(self._dialect, WorkerPluginRow).values(links))

    async def serve_sites(self, worker_id: str, addresses: Mapping[str, str]) -> None:
        """Replace where a worker serves the routes of plugins: ``host:port`` by the plugin's key."""
        await self._count(delete(WorkerSiteRow).where(WorkerSiteRow.worker_id == worker_id))
        if addresses:
            rows = [
                {"worker_id": worker_id, "plugin_key": key, "address": address}
                for key, address in addresses.items()
            ]
            await self._rows(insert(self._dialect, WorkerSiteRow).values(rows))

    async def serve_timers(self, worker_id: str, timers: Sequence[CallbackTimer]) -> None:
        """Replace the timers with callbacks that exist in a worker."""
        await self._count(delete(WorkerTimerRow).where(WorkerTimerRow.worker_id == worker_id))
        if timers:
            rows = [{"worker_id": worker_id, **asdict(timer)} for timer in timers]
            await self._rows(insert(self._dialect, WorkerTimerRow).values(rows))

    async def forget_timers(self) -> list[CallbackTimer]:
        """Delete the timers with callbacks of workers that have gone; returns them."""
        there = select(WorkerRow.id).where(~is_free(WorkerRow.lease_until))
        gone = delete(WorkerTimerRow).where(WorkerTimerRow.worker_id.not_in(there))
        columns = [getattr(WorkerTimerRow, item.name) for item in fields(CallbackTimer)]
        return await self._all(CallbackTimer, gone.returning(*columns))

    async def sites_of(self, plugin_key: str) -> list[Site]:
        """List where live workers serve the routes of a plugin."""
        statement = (
            select(WorkerSiteRow.worker_id, WorkerSiteRow.address, WorkerRow.host)
            .join(WorkerRow, WorkerRow.id == WorkerSiteRow.worker_id)
            .where(WorkerSiteRow.plugin_key == plugin_key, ~is_free(WorkerRow.lease_until))
            .order_by(WorkerSiteRow.worker_id)
        )
        return await self._all(Site, statement)

    async def forget_gone(self) -> int:
        """Delete workers without a lease, and the versions that no worker serves; returns how many workers.

        Call it only while a worker is live: the rows of the last workers are the last published catalogue.
        """
        gone = select(WorkerRow.id).where(is_free(WorkerRow.lease_until))
        await self._count(delete(WorkerPluginRow).where(WorkerPluginRow.worker_id.in_(gone)))
        # Also those of workers that an older release deleted.
        there = select(WorkerRow.id).where(~is_free(WorkerRow.lease_until))
        await self._count(delete(WorkerSiteRow).where(WorkerSiteRow.worker_id.not_in(there)))
        count = await self._count(delete(WorkerRow).where(is_free(WorkerRow.lease_until)))
        served = select(WorkerPluginRow.digest)
        await self._count(delete(PluginSnapshotRow).where(PluginSnapshotRow.digest.not_in(served)))
        return count
