"""The directories of pinned plugins where hosts share no disk: their owner has them, and stores them.

An owner begins with what the one before has stored. While it owns the plugin it commits what has changed,
about once a second and after the plugin's cleanup. A commit requires the lease, so an old owner cannot
replace files of the next one, and it waits for a moment at which no file changes, so the files of a database
fit together.

The database that plugins share (``resolve_db_url``) is such a directory, too: one process has it, and owns
all plugins that use it.

Code may open files while it is imported, in each process. If a new owner has opened files that it must
replace, its process ends as after a signal to stop, and the next one imports the plugin with the right files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loguru import logger

from nekro.app.areas.scopes import SyncedUse
from nekro.app.areas.synced import SyncedAreas, database_place
from nekro.app.leases import HeldLease
from nekro.base.tasks import end_tasks, log_errors
from nekro_agent import layout
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import StorageError
from storage.files.host_files import AreaPlace
from storage.files.manifest import LeaseWriter

__all__ = ["PinnedFiles"]

#: Share of the time that looking for changes may take.
_MOST_SHARE: Final = 0.1
#: Attempts in a row to commit files that change all the time, after which this is logged.
_MOST_BUSY: Final = 30


class PinnedFiles:
    """The directories of the plugins that this process owns; use it on one loop."""

    def __init__(
        self, areas: SyncedAreas, *, data_dir: Path, uses_database: Callable[[str], bool] = lambda _: False
    ) -> None:
        """
        Args:
            uses_database: whether a plugin uses the database that plugins share.
        """
        self._areas = areas
        self._data_dir = data_dir
        self.uses_database = uses_database
        self._held: dict[str, _Directory] = {}

    async def take(self, plugin_key: str, lease: HeldLease) -> None:
        """Bring a plugin's directory, if it is pinned, and store what changes in it from now on.

        Raises:
            DamagedFileError, InvalidValueError, StorageUnavailableError: it cannot be brought.
            StorageError: this process has opened files that were replaced; it stops.
        """
        if self._areas.policy_of(plugin_key) == "pinned":
            await self._take(plugin_key, self._areas.plugin(plugin_key, takes_over=True), lease)

    async def take_database(self, name: str, lease: HeldLease) -> None:
        """The same for the database that plugins share; ``leave`` takes the name."""
        place = database_place(layout.plugin_database(self._data_dir).parent)
        await self._take(name, place, lease)

    async def leave(self, name: str) -> None:
        """Store what has changed, and end the use; call it before the lease is released.

        Args:
            name: a plugin's key, or that of the database.
        """
        directory = self._held.pop(name, None)
        if directory is not None:
            await directory.close()

    async def _take(self, name: str, place: AreaPlace, lease: HeldLease) -> None:
        before = _opened_below(place.directory)
        held = contextlib.AsyncExitStack()
        use = await held.enter_async_context(self._areas.using(place))
        replaced = [path for fd, path in before.items() if _opened(fd) == f"{path} (deleted)"]
        if replaced:
            await held.aclose()
            # What the plugin has opened is no file of the directory any more, and would lose what it writes.
            logger.bind(plugin=name, file=replaced[0]).warning("pinned_plugin_restarts")
            os.kill(os.getpid(), signal.SIGTERM)
            raise StorageError(f"{name}: {replaced[0]} was opened at import and replaced since")
        self._held[name] = _Directory(use, LeaseWriter(lease=lease.key, fence=lease.fence), held, name)


def _opened_below(directory: Path) -> dict[int, str]:
    """Return the files of a directory that this process has open, by descriptor."""
    files = {int(name): _opened(int(name)) for name in os.listdir("/proc/self/fd")}
    return {fd: path for fd, path in files.items() if path.startswith(f"{directory}/")}


def _opened(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # it was closed meanwhile
        return ""


class _Directory:
    """The directory of one plugin."""

    def __init__(
        self, use: SyncedUse, writer: LeaseWriter, held: contextlib.AsyncExitStack, plugin_key: str
    ) -> None:
        self._use, self._writer, self._held, self._plugin_key = use, writer, held, plugin_key
        self._busy = 0
        self._task = asyncio.create_task(self._keep(), name=f"nekro-files-{plugin_key}")

    async def close(self) -> None:
        """Store what has changed, also if it changes now."""
        await end_tasks(self._task)
        try:
            with log_errors("pinned_files_not_stored", plugin=self._plugin_key):
                await self._use.push(writer=self._writer)
        finally:
            await self._held.aclose()

    async def _keep(self) -> None:
        while True:
            begun = time.monotonic()
            with log_errors("pinned_files_not_stored", plugin=self._plugin_key):
                await self._store()
            await asyncio.sleep(max(FRESH_SECONDS, (time.monotonic() - begun) / _MOST_SHARE))

    async def _store(self) -> None:
        is_busy = await self._use.push_quiet(writer=self._writer)
        self._busy = self._busy + 1 if is_busy else 0
        if self._busy == _MOST_BUSY:
            logger.bind(plugin=self._plugin_key, attempts=_MOST_BUSY).warning("pinned_files_change_always")
