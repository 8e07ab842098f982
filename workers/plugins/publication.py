"""Publishes what this worker serves to the catalogue, and keeps it published while the worker runs."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.app.leases import WORKER, HeldLease, LeaseKeeper
from nekro.base.release import release
from nekro.base.tasks import log_errors
from nekro.plugins.description import entries_of, source_digest
from nekro.plugins.entries import digest_of
from nekro.plugins.loader import LoadedPlugins, PluginRecord
from nekro.plugins.registry import LoadedRegistry
from nekro.wire.invocation import new_id
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.ports import CallbackTimer
from nekro_agent.shared_clock import elapsed_seconds
from storage.caller_reads import Snapshot
from storage.catalogue import NewWorker
from storage.engine import Database

__all__ = ["CataloguePublisher"]


class CataloguePublisher:
    """Keeps the rows of one worker; ``start`` and ``close`` it on the loop of the services."""

    def __init__(
        self,
        database: Database,
        background: BackgroundLoop,
        leases: LeaseKeeper,
        *,
        loaded: LoadedPlugins,
        registry: LoadedRegistry,
        name: str,
        lane: str,
        lease_seconds: float,
        sites: Callable[[], Mapping[str, str]] = dict,
        timers: Callable[[], Sequence[CallbackTimer]] = list,
    ) -> None:
        """Create the publisher; nothing is written yet.

        Args:
            name: how the catalogue names this worker.
            sites: returns where this worker serves the HTTP routes of plugins.
            timers: returns the timers with callbacks that exist in this worker.
            lease_seconds: how long a worker that died stays in the catalogue.
        """
        self._database = database
        self._background = background
        self._leases = leases
        self._loaded = loaded
        self._registry = registry
        self._lease_seconds = lease_seconds
        self._sites = sites
        self._timers = timers
        self._worker = NewWorker(
            id=new_id(),
            name=name,
            lane=lane,
            host=socket.gethostname(),
            pid=os.getpid(),
            release=release(),
        )
        self._lease: HeldLease | None = None
        self._published: object = None
        self._listed: Sequence[CallbackTimer] = ()
        self._digests: dict[str, tuple[object, str]] = {}
        self._is_closed = False
        #: Held on the background loop: a publication under way must not add a worker that has left.
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Publish what the worker serves, and publish it again whenever that changes.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        await self.publish()
        self._background.submit(self._keep())

    async def close(self) -> None:
        """Leave the catalogue; if the database does not answer, the worker ages out."""
        self._is_closed = True
        if self._lease is None:
            return
        self._lease.drop()
        with log_errors("worker_not_taken_out_of_the_catalogue"):
            await self._background.wait(self._leave())

    async def _leave(self) -> None:
        async with self._writing, self._database.autocommit() as transaction:
            await transaction.catalogue.leave(self._worker.id)

    async def publish(self) -> None:
        """Write what the worker serves now, even if nothing has changed.

        Raises:
            StorageUnavailableError: the database does not answer; nothing has changed.
        """
        state, sites, timers = self._state(), self._sites(), self._timers()
        snapshots = await asyncio.to_thread(self._snapshots)
        since = elapsed_seconds()
        async with self._database.begin() as transaction:
            fence = await transaction.catalogue.enter(self._worker, lease_seconds=self._lease_seconds)
            await transaction.catalogue.serve(self._worker.id, snapshots)
            await transaction.catalogue.serve_sites(self._worker.id, sites)
            await transaction.catalogue.serve_timers(self._worker.id, timers)
            ended = await transaction.catalogue.forget_timers()
            await transaction.catalogue.forget_gone()
        for timer in ended:
            # Set again if ``on_enabled`` had set it; a timer that a method set is lost.
            log = logger.bind(plugin=timer.plugin_key, chat_key=timer.chat_key, timer=timer.description)
            log.warning("callback_timer_ended_with_its_worker")
        if self._lease is not None:
            self._lease.drop()
        self._lease = self._leases.hold(
            WORKER, self._worker.id, fence, seconds=self._lease_seconds, since=since, on_lost=self._forget
        )
        self._published, self._listed = state, timers
        logger.bind(plugins=len(snapshots)).debug("catalogue_published")

    async def _keep(self) -> None:
        while not self._is_closed:
            await asyncio.sleep(FRESH_SECONDS)  # a check costs some microseconds per plugin
            with log_errors("catalogue_not_published"):
                async with self._writing:
                    if not self._is_closed and self._published != self._state():
                        await self.publish()
                    await self._list_timers()

    async def _list_timers(self) -> None:
        timers = self._timers()
        if not self._is_closed and timers != self._listed:
            async with self._database.begin() as transaction:
                await transaction.catalogue.serve_timers(self._worker.id, timers)
            self._listed = timers

    def _forget(self) -> None:
        """Let the next check publish again: another process has deleted the rows of this one."""
        self._published = None

    def _state(self) -> object:
        """Return what determines the snapshots and may change while the worker runs."""
        records = [
            (record.key, record.status, record.error, record.path, tuple(record.placeholders))
            for record in self._loaded.records
        ]
        return records, self._registry.plugins, self._sites()

    def _snapshots(self) -> list[Snapshot]:
        snapshots = []
        for entry in entries_of(self._loaded, self._registry, digest=self._digest):
            text = entry.to_json()
            snapshots.append(Snapshot(digest=digest_of(text), plugin_key=entry.key, entry=text))
        return snapshots

    def _digest(self, record: PluginRecord) -> str:
        """Return the digest of a plugin's files, read once per import: later changes are not loaded."""
        module = sys.modules.get(record.module)
        known = self._digests.get(record.path)
        if known is None or known[0] is not module:
            known = self._digests[record.path] = (module, source_digest(record))
        return known[1]
