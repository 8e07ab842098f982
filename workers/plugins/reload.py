"""Hot reload: a plugin whose files changed is imported again while the worker runs.

A change is noticed by sizes and times of change of the files. The new version is imported under module names
of its own, on a thread, and initialised; then it gets all new calls. Calls, commands, hooks and jobs that run
end on the old version, which is cleaned up after the last of them. A version that cannot be imported or
initialised changes nothing: the old one stays, and the log and ``nekro plugins`` name the reason. A plugin
whose import or init took too long when the worker started is taken up in the same way, as the first version
of it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from loguru import logger

from nekro.app.leases import LeaseKeeper
from nekro.base.tasks import OwnedTasks, log_errors
from nekro.plugins.discovery import SourceKind
from nekro.plugins.hooks import PluginHost
from nekro.plugins.importing import Imported, import_plugin
from nekro.plugins.lanes import LaneChooser
from nekro.plugins.loader import LoadedPlugins, forget
from nekro_agent.durations import POLL_SECONDS, REFRESH_SECONDS
from nekro_agent.plugin import NekroPlugin, is_in_use
from workers.plugins.initialisation import init_lock

__all__ = [
    "PluginReloader",
    "SourceWatch",
    "Stamps",
    "stamps_below",
]


_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "venv", "tests", "docs"})

#: Path → time of change in ns, size, inode.
Stamps = dict[str, tuple[int, int, int]]


class SourceWatch:
    """Watches the Python files of one plugin."""

    def __init__(self, imported: Imported) -> None:
        """The present files count as those that were imported."""
        self._imported = imported
        self._loaded = self._previous = self._stamps()

    def has_changed(self) -> bool:
        """Check the files; True once for each change, when two checks in a row see the same.

        A change of several files, or an editor that writes in steps, is thus one change.
        """
        stamps, previous = self._stamps(), self._previous
        self._previous = stamps
        if stamps == self._loaded or stamps != previous:
            return False
        self._loaded = stamps
        return True

    def _stamps(self) -> Stamps:
        return _stamps_of(self._files())

    def _files(self) -> Iterator[str]:
        source = self._imported.source
        if source is None:
            return
        if source.kind is SourceKind.FILE:
            yield str(source.path)
            yield from self._imported_files()
            return
        yield from _python_files(source.path)

    def _imported_files(self) -> Iterator[str]:
        """Yield the files beside a plugin of one file that it has imported."""
        prefix = f"{self._imported.package}."
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name.startswith(prefix) and file:
                yield file


def stamps_below(paths: Iterable[Path]) -> Stamps:
    """Return the stamps of the Python files that are some paths, or in folders at these paths."""
    stamps: Stamps = {}
    for path in paths:
        stamps |= _stamps_of([str(path)] if path.is_file() else _python_files(path, follows_links=True))
    return stamps


def _stamps_of(files: Iterable[str]) -> Stamps:
    stamps: Stamps = {}
    for path in files:
        try:
            stat = os.stat(path)
        except OSError:
            continue
        stamps[path] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return stamps


def _python_files(path: Path, *, follows_links: bool = False) -> Iterator[str]:
    seen = set[str]()
    for folder, folders, files in os.walk(path, followlinks=follows_links):
        real = os.path.realpath(folder) if follows_links else folder
        if real in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        yield from (str(Path(folder, name)) for name in files if name.endswith(".py"))


class PluginReloader:
    """Reloads the plugins of one worker process whose files change."""

    def __init__(
        self,
        loaded: LoadedPlugins,
        host: PluginHost,
        leases: LeaseKeeper,
        lanes: LaneChooser,
        *,
        owner: str,
        may_run_here: Callable[[str], bool],
        is_wanted: Callable[[NekroPlugin], Awaitable[bool]],
        on_change: Callable[[], None],
    ) -> None:
        """Create it; ``start`` watches the files.

        Args:
            may_run_here: whether this process may run the plugin of a key: its owner if it is pinned.
            is_wanted: whether a plugin is to be enabled.
            on_change: called after a new version replaced an old one.
        """
        self._loaded, self._host, self._leases, self._lanes = loaded, host, leases, lanes
        self._owner, self._may_run_here, self._is_wanted = owner, may_run_here, is_wanted
        self._on_change = on_change
        self._watches: dict[str, SourceWatch] = {}
        self._is_watching = False
        self._tasks = OwnedTasks("nekro-plugin-reload")

    def start(self, *, watches: bool) -> None:
        """Take up the plugins that are still imported, on the running loop.

        Args:
            watches: whether to follow the files too.
        """
        for imported in self._loaded.found:
            if imported.later is not None:
                self._tasks.begin(self._take_up(imported, imported.later))
        self._is_watching = watches
        if watches:
            self._tasks.begin(self._watch())

    async def close(self) -> None:
        """Stop watching; versions that are still in use are cleaned up with the others."""
        await self._tasks.close()

    async def _take_up(self, waiting: Imported, later: Future[Imported]) -> None:
        new = await asyncio.wrap_future(later)
        with log_errors("plugin_not_loaded", path=waiting.path):
            await self._use(waiting, new)

    async def _watch(self) -> None:
        for imported in self._loaded.found:
            is_here = imported.source is not None and imported.later is None
            if is_here and not imported.is_shipped:
                self._watches[imported.path] = SourceWatch(imported)
        while True:
            # A change takes effect after the second check that sees it.
            await asyncio.sleep(REFRESH_SECONDS)
            for path in await asyncio.to_thread(self._changed):
                with log_errors("plugin_not_reloaded", path=path):
                    await self._reload(path)

    def _changed(self) -> list[str]:
        return [path for path, watch in self._watches.items() if watch.has_changed()]

    async def _reload(self, path: str) -> None:
        old = next(imported for imported in self._loaded.found if imported.path == path)
        assert old.source is not None  # noqa: S101 - only sources are watched
        await self._use(old, await asyncio.to_thread(import_plugin, old.source, is_reload=True))

    async def _use(self, old: Imported, new: Imported) -> None:
        error = await self._why_unusable(old, new)
        if error is not None:
            self._refuse(old, new, error)
            return
        assert new.plugin is not None  # noqa: S101 - see above
        self._loaded.is_registering = True  # messages arrive on another thread
        try:
            self._loaded.replace(old, new)
            self._host.use(self._loaded.plugins)
            self._on_change()
        finally:
            self._loaded.is_registering = False
        if self._is_watching and not new.is_shipped:
            self._watches[new.path] = SourceWatch(new)
        logger.bind(plugin=new.key, version=new.plugin.version).info("plugin_reloaded")
        if old.plugin is not None:
            self._tasks.begin(self._retire(old, old.plugin))

    async def _why_unusable(self, old: Imported, new: Imported) -> str | None:
        """Initialise a new version; returns why it cannot be used, None if it can."""
        if new.plugin is None:
            return new.error
        if old.plugin is None and any(plugin.key == new.key for plugin in self._loaded.plugins):
            return f"another plugin has the key {new.key}"
        if old.plugin is not None and new.key != old.key:
            return f"its key is now {new.key}, which needs a restart of the workers"
        new.plugin.set_enabled(await self._is_wanted(new.plugin))
        if self._host.has_started(new.plugin):  # its init took long, and has ended now
            return None
        if not new.plugin.is_enabled or not self._may_run_here(new.key):
            return None
        return await self._initialise(old.plugin, new.plugin)

    async def _initialise(self, old: NekroPlugin | None, new: NekroPlugin) -> str | None:
        """Run the init of the new version; returns its error."""
        if old is not None and self._lanes.is_pinned(old.key):
            self._host.cancel_tasks(old)  # its loops must exist once
        async with init_lock(self._leases, owner=self._owner):
            failures = await self._host.start_plugin(new)
            if not failures and self._lanes.is_pinned(new.key):
                await self._host.run_state_hooks(new)  # what those of the old version set up ends with it
        if not failures:
            return None
        await self._host.stop_plugin(new)
        return failures[0].text

    def _refuse(self, old: Imported, new: Imported, error: str) -> None:
        """Keep the old version, also as the owner of its task types, which importing the new one changed."""
        if new.plugin is not None:
            forget(new)
        if old.plugin is not None:
            old.plugin.claim_task_types()
            error_of_old = f"reload: {error}; version {old.plugin.version} is still used"
            self._loaded.add_error(old.key, error_of_old)
        else:
            self._loaded.replace(old, dataclasses.replace(old, error=error, later=None))
        logger.bind(plugin=old.key, error=error).error("plugin_reload_failed")

    async def _retire(self, old: Imported, plugin: NekroPlugin) -> None:
        while is_in_use(plugin):  # noqa: ASYNC110 - runs end on other threads too
            await asyncio.sleep(POLL_SECONDS)
        await self._host.stop_plugin(plugin)
        forget(old)
        logger.bind(plugin=plugin.key, version=plugin.version).debug("plugin_version_ended")
