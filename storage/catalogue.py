"""The catalogue: live workers and the plugins that they serve, and lists of workers with what they run.

``storage.caller_reads`` reads it for processes that call methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import delete, func, select, update

from nekro_agent.ports import CallbackTimer, JobState
from storage.caller_reads import Snapshot
from storage.repositories.base import Repository, columns_of, is_one_of
from storage.repositories.leases import LeaseTable, is_free
from storage.sql import insert, now, seconds_from_now
from storage.states import CallState, RoundState
from storage.tables import (
    CALLS,
    JOBS,
    PLUGIN_SNAPSHOTS,
    ROUNDS,
    WORKER_PLUGINS,
    WORKER_SITES,
    WORKER_TIMERS,
    WORKERS,
)

__all__ = [
    "WORKER_LEASES",
    "CatalogueRepository",
    "ListedWorker",
    "NewWorker",
    "Site",
    "WorkerListing",
]


WORKER_LEASES: Final = LeaseTable(
    key=WORKERS.c.id, fence=WORKERS.c.fence, is_live=WORKERS.c.lease_until.is_not(None)
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
        new = insert(self._dialect, WORKERS).values(
            id=worker.id, name=worker.name, lane=worker.lane, host=worker.host, pid=worker.pid,
            started_at=now(), owner=worker.name, lease_until=seconds_from_now(lease_seconds), fence=1,
            release=worker.release,
        )  # fmt: skip
        statement = new.on_conflict_do_update(
            index_elements=[WORKERS.c.id],
            set_={"lease_until": seconds_from_now(lease_seconds), "fence": WORKERS.c.fence + 1},
        ).returning(WORKERS.c.fence)
        return int(await self._scalar(statement))

    async def leave(self, worker_id: str) -> None:
        """Release a worker's lease: it is not live any more."""
        await self._count(update(WORKERS).where(WORKERS.c.id == worker_id).values(lease_until=None))

    async def serve(self, worker_id: str, snapshots: Sequence[Snapshot]) -> None:
        """Replace what a worker serves; ``snapshots`` are in the order of its plugins."""
        if self._dialect == "postgresql":
            # Another worker would otherwise delete a version that it finds unused, while this one links it.
            await self._connection.exec_driver_sql(
                "LOCK TABLE plugin_snapshots, worker_plugins IN SHARE ROW EXCLUSIVE MODE"
            )
        await self._count(delete(WORKER_PLUGINS).where(WORKER_PLUGINS.c.worker_id == worker_id))
        if not snapshots:
            return
        new = insert(self._dialect, PLUGIN_SNAPSHOTS).values(
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
        await self._rows(new.on_conflict_do_nothing(index_elements=[PLUGIN_SNAPSHOTS.c.digest]))
        links = [
            {"worker_id": worker_id, "position": position, "digest": one.digest}
            for position, one in enumerate(snapshots)
        ]
        await self._rows(insert(self._dialect, WORKER_PLUGINS).values(links))

    async def serve_sites(self, worker_id: str, addresses: Mapping[str, str]) -> None:
        """Replace where a worker serves the routes of plugins: ``host:port`` by the plugin's key."""
        await self._count(delete(WORKER_SITES).where(WORKER_SITES.c.worker_id == worker_id))
        if addresses:
            rows = [
                {"worker_id": worker_id, "plugin_key": key, "address": address}
                for key, address in addresses.items()
            ]
            await self._rows(insert(self._dialect, WORKER_SITES).values(rows))

    async def serve_timers(self, worker_id: str, timers: Sequence[CallbackTimer]) -> None:
        """Replace the timers with callbacks that exist in a worker."""
        await self._count(delete(WORKER_TIMERS).where(WORKER_TIMERS.c.worker_id == worker_id))
        if timers:
            rows = [{"worker_id": worker_id, **asdict(timer)} for timer in timers]
            await self._rows(insert(self._dialect, WORKER_TIMERS).values(rows))

    async def forget_timers(self) -> list[CallbackTimer]:
        """Delete the timers with callbacks of workers that have gone; returns them."""
        there = select(WORKERS.c.id).where(~is_free(WORKERS.c.lease_until))
        gone = delete(WORKER_TIMERS).where(WORKER_TIMERS.c.worker_id.not_in(there))
        columns = columns_of(WORKER_TIMERS, CallbackTimer)
        return await self._all(CallbackTimer, gone.returning(*columns))

    async def sites_of(self, plugin_key: str) -> list[Site]:
        """List where live workers serve the routes of a plugin."""
        statement = (
            select(WORKER_SITES.c.worker_id, WORKER_SITES.c.address, WORKERS.c.host)
            .join(WORKERS, WORKERS.c.id == WORKER_SITES.c.worker_id)
            .where(WORKER_SITES.c.plugin_key == plugin_key, ~is_free(WORKERS.c.lease_until))
            .order_by(WORKER_SITES.c.worker_id)
        )
        return await self._all(Site, statement)

    async def forget_gone(self) -> int:
        """Delete workers without a lease, and the versions that no worker serves; returns how many workers.

        Call it only while a worker is live: the rows of the last workers are the last published catalogue.
        """
        gone = select(WORKERS.c.id).where(is_free(WORKERS.c.lease_until))
        await self._count(delete(WORKER_PLUGINS).where(WORKER_PLUGINS.c.worker_id.in_(gone)))
        # Also those of workers that an older release deleted.
        there = select(WORKERS.c.id).where(~is_free(WORKERS.c.lease_until))
        await self._count(delete(WORKER_SITES).where(WORKER_SITES.c.worker_id.not_in(there)))
        count = await self._count(delete(WORKERS).where(is_free(WORKERS.c.lease_until)))
        served = select(WORKER_PLUGINS.c.digest)
        await self._count(delete(PLUGIN_SNAPSHOTS).where(PLUGIN_SNAPSHOTS.c.digest.not_in(served)))
        return count


@dataclass(frozen=True, kw_only=True)
class ListedWorker:
    """What a worker's row says besides the catalogue."""

    id: str
    release: str | None
    #: When it is no longer live unless it renews its lease; None: it has stopped.
    lease_until: datetime | None


class WorkerListing(Repository):
    """Reads workers for lists."""

    async def by_id(self, worker_ids: Collection[str]) -> dict[str, ListedWorker]:
        """Return workers by their ids."""
        statement = select(WORKERS.c.id, WORKERS.c.release, WORKERS.c.lease_until)
        rows = await self._all(ListedWorker, statement.where(WORKERS.c.id.in_(worker_ids)))
        return {row.id: row for row in rows}

    async def running(self) -> tuple[Counter[str], Counter[str], Counter[str]]:
        """Count the recorded calls, rounds and jobs that run, by the name of their worker.

        Calls of TOOL methods have no row, so they are not counted.
        """
        calls = select(CALLS.c.worker, func.count()).where(
            is_one_of(CALLS.c.state, CallState.QUEUED, CallState.RUNNING), CALLS.c.state == CallState.RUNNING
        )
        rounds = select(ROUNDS.c.worker, func.count()).where(
            is_one_of(ROUNDS.c.state, RoundState.REQUESTED, RoundState.RUNNING),
            ROUNDS.c.state == RoundState.RUNNING,
        )
        jobs = select(JOBS.c.worker, func.count()).where(
            is_one_of(JOBS.c.state, JobState.QUEUED, JobState.RUNNING), JOBS.c.state == JobState.RUNNING
        )
        found = []
        for statement, column in ((calls, CALLS.c.worker), (rounds, ROUNDS.c.worker), (jobs, JOBS.c.worker)):
            rows = await self._rows(statement.group_by(column))
            found.append(Counter({row[0]: row[1] for row in rows if row[0] is not None}))
        return found[0], found[1], found[2]
