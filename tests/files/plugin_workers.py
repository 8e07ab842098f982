"""Worker processes on hosts with disks of their own, as far as they keep plugins' files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from broker_config.settings import DatabaseSettings, Settings
from nekro.app.areas.synced import SyncedAreas
from nekro.app.background import BackgroundLoop
from nekro.app.leases import PINNED, HeldLease, LeaseKeeper
from storage.engine import Database
from storage.files.areas import DataAreas
from storage.files.host_files import HostFiles
from storage.files.stores.store import ObjectStore
from workers.plugins.pinned_files import PinnedFiles

POLICIES = {"a.synced": "synced", "a.local": "local", "a.pinned": "pinned"}


class Worker:
    """A worker process on a host with a disk of its own."""

    def __init__(self, root: Path, where: DatabaseSettings, store: ObjectStore) -> None:
        self.root = root
        self.database = Database(where, root)
        self.background = BackgroundLoop(self.database)
        self.leases = LeaseKeeper(self.database, self.background)
        files = HostFiles(self.database, store, root=root / "files", cache_bytes=1 << 30)
        self.areas = SyncedAreas(
            DataAreas(root),
            files,
            self.background,
            Settings.load(env_file=None, data_dir=root),
            policy_of=lambda key: POLICIES.get(key, "unused"),
        )
        self.pinned = PinnedFiles(self.areas, data_dir=root)

    @contextlib.asynccontextmanager
    async def call(self, key: str) -> AsyncIterator[Path]:
        """The block is a method of the plugin, which has taken its path at import."""
        path = self.areas.on_host.plugin_dir(key)
        async with self.areas.scope("method", plugin_key=key):
            yield path

    async def own(self) -> HeldLease:
        """Become the owner of the pinned plugin."""
        lease = await self.leases.acquire(PINNED, "pinned:a.pinned", owner="me", seconds=60)
        assert lease is not None
        await self.pinned.take("a.pinned", lease)
        return lease

    async def close(self) -> None:
        await self.areas.close()
        self.background.close()
        await self.database.dispose()


@contextlib.asynccontextmanager
async def two_workers(
    directory: Path, where: DatabaseSettings, store: ObjectStore
) -> AsyncIterator[tuple[Worker, Worker]]:
    """Two hosts with a worker each."""
    one, two = (Worker(directory / name, where, store) for name in ("one", "two"))
    try:
        yield one, two
    finally:
        for worker in (one, two):
            await worker.close()
