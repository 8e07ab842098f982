"""Finds and imports plugins; a failure is recorded with its reason and does not stop other plugins."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import importlib.metadata
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from nekro.plugins.discovery import PluginSource, discover
from nekro.plugins.entries import PluginStatus
from nekro.plugins.importing import SHIPPED, Imported, import_entry_point, import_plugin
from nekro_agent import placeholders, runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.durations import PROGRESS_SECONDS
from nekro_agent.methods import BUILT_IN_PLUGIN
from nekro_agent.plugin import NekroPlugin
from nekro_agent.runtime import CoreConfig, PackagePolicy

__all__ = [
    "ENTRY_POINT_GROUP",
    "LoadedPlugins",
    "PluginRecord",
    "PluginStatus",
    "PreparedPlugins",
    "Step",
    "close_loop_of_imports",
    "forget",
    "import_step",
    "load_plugins",
    "loop_of_imports",
    "plugin_steps",
    "prepare_imports",
]

ENTRY_POINT_GROUP: Final = "nekro_agent.plugins"
#: What Python says to a plugin that sets a signal handler at import, off the main thread.
_NEEDS_MAIN_THREAD: Final = "signal only works in main thread"

_log = get_sub_logger("loader")


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """One plugin, or one that failed, as ``nekro plugins`` lists it."""

    #: The plugin's key; the file's name if loading failed before the key was known.
    key: str
    status: PluginStatus
    path: str
    version: str
    error: str | None
    placeholders: list[str]
    plugin: NekroPlugin | None
    #: Import name of its module; "" when none was imported.
    module: str = ""


@dataclass(frozen=True, kw_only=True)
class PreparedPlugins:
    """What the template has already imported when it forks this worker; see ``workers.template``."""

    steps: tuple[Step, ...]
    #: By text of the step; the others are imported by the worker itself.
    imported: dict[str, Imported]
    #: Texts of the steps that took too long there.
    slow: frozenset[str]


class LoadedPlugins:
    """The result of :func:`load_plugins`, in loading order."""

    def __init__(self, found: Iterable[Imported]) -> None:
        self._found = list(found)
        self._init_errors: dict[str, str] = {}
        #: Messages for operators that concern no single plugin.
        self.warnings: list[str] = []
        #: Whether a plugin is listed whose methods are not registered yet.
        self.is_registering = False

    @property
    def plugins(self) -> list[NekroPlugin]:
        """Every plugin that loaded, including disabled ones."""
        return [loaded.plugin for loaded in self._found if loaded.plugin is not None]

    @property
    def records(self) -> list[PluginRecord]:
        """Every plugin and failure, with the placeholders used up to now."""
        return [self._record(loaded) for loaded in self._found]

    @property
    def found(self) -> list[Imported]:
        """Every plugin and failure."""
        return list(self._found)

    @property
    def is_complete(self) -> bool:
        """Whether no import goes on, and the methods of all plugins are registered."""
        return not self.is_registering and all(loaded.later is None for loaded in self._found)

    def replace(self, old: Imported, new: Imported) -> None:
        """List a new version of a plugin instead of the old one, without the errors of its init."""
        self._found[self._found.index(old)] = new
        if old.later is None:
            self._init_errors.pop(new.key, None)

    def add(self, new: Imported) -> None:
        """List one more plugin."""
        self._found.append(new)

    def remove(self, old: Imported) -> None:
        """List a plugin no longer."""
        self._found.remove(old)
        self._init_errors.pop(old.key, None)

    def add_error(self, plugin_key: str, error: str) -> None:
        """Record that a plugin's init or reload failed; it is listed as failed and keeps its methods."""
        self._init_errors[plugin_key] = error

    def _record(self, loaded: Imported) -> PluginRecord:
        names = placeholders.used_by(loaded.package)
        plugin = loaded.plugin
        error = loaded.error or (self._init_errors.get(plugin.key) if plugin else None)
        status = PluginStatus.OK
        if loaded.later is not None:
            status = PluginStatus.STARTING
        elif error is not None:
            status = PluginStatus.FAILED
        elif plugin is not None and not plugin.is_enabled:
            status = PluginStatus.DISABLED
        elif names:
            status = PluginStatus.DEGRADED
        return PluginRecord(
            key=plugin.key if plugin else loaded.key,
            status=status,
            path=loaded.path,
            version=plugin.version if plugin else "",
            error=error,
            placeholders=names,
            plugin=plugin,
            module=loaded.module,
        )


def load_plugins(
    dirs: Iterable[Path] = (),
    *,
    disabled: Iterable[str] = (),
    shipped: bool = True,
    entry_points: bool = True,
    data_dir: Path | None = None,
    packages: PackagePolicy | None = None,
    core: CoreConfig | None = None,
    patience_seconds: float | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
    prepared: PreparedPlugins | None = None,
) -> LoadedPlugins:
    """Import every plugin: the shipped ones, those of ``dirs`` in order, then installed entry points.

    Args:
        dirs: plugins, or folders that hold plugins (see :mod:`nekro.plugins.discovery`).
        disabled: keys of plugins that load but offer no methods.
        entry_points: whether to load from installed distributions (group ``nekro_agent.plugins``;
            the object is a module with ``plugin``, or the plugin).
        data_dir: data root for plugins that need it during their import, when no runtime is
            bound yet.
        packages: what plugins may install during their import.
        core: what ``core.config`` has during their import.
        patience_seconds: how long to wait for the import of one plugin. A slower one is listed with the
            status ``starting``, and its import goes on. None waits, and imports on this thread.
        on_progress: called with what is done next.
        prepared: what this process has imported already, of the same folders.
    """
    prepare_imports(data_dir=data_dir, packages=packages, core=core)
    steps = prepared.steps if prepared else plugin_steps(dirs, shipped=shipped, entry_points=entry_points)
    found: list[Imported] = []
    paths_by_key = {BUILT_IN_PLUGIN: ""}
    for step in steps:
        loaded = prepared.imported.get(step.text) if prepared else None
        if loaded is None:
            on_progress(step.text)
            is_slow = prepared is not None and step.text in prepared.slow
            loaded = (
                step.work()
                if patience_seconds is None
                else _within(step, patience_seconds, on_progress, waits=not is_slow)
            )
        found.append(_unique(loaded, paths_by_key))
    off = set(disabled)
    result = LoadedPlugins(found)
    for plugin in result.plugins:
        plugin.set_enabled(plugin.key not in off)
    for unknown in sorted(off - {plugin.key for plugin in result.plugins}):
        result.warnings.append(
            f"NEKRO_PLUGINS__DISABLED names {unknown}, but no plugin of that key is loaded"
        )
        _log.bind(plugin=unknown).warning("disabled_plugin_not_loaded")
    return result


def prepare_imports(
    *, data_dir: Path | None, packages: PackagePolicy | None, core: CoreConfig | None
) -> None:
    """Provide what plugins use during their import; for the arguments see ``load_plugins``."""
    placeholders.install()
    if data_dir is not None and not runtime.is_bound():
        runtime.prepare(data_dir=data_dir, packages=packages, core=core)


def forget(imported: Imported) -> None:
    """Drop the modules of one plugin, and what is known of its placeholders."""
    if imported.imports is not None:
        imported.imports.forget()
    elif imported.package:
        for name in [n for n in sys.modules if n == imported.package or n.startswith(f"{imported.package}.")]:
            del sys.modules[name]
    placeholders.forget(imported.package)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One plugin to import."""

    name: str
    path: str
    work: Callable[[], Imported]
    source: PluginSource | None = None

    @property
    def text(self) -> str:
        """What is done."""
        return f"importing {self.name} ({self.path})"


def plugin_steps(dirs: Iterable[Path], *, shipped: bool = True, entry_points: bool = True) -> Iterator[Step]:
    """Find the plugins, in loading order; for the arguments see ``load_plugins``."""

    def step(source: PluginSource, *, is_shipped: bool) -> Step:
        work = partial(import_plugin, source, is_shipped=is_shipped)
        return Step(name=source.name, path=str(source.path), work=work, source=source)

    if shipped:
        package = importlib.import_module(SHIPPED)
        for source in discover(Path(package.__path__[0])):
            yield step(source, is_shipped=True)
    for directory in dirs:
        if not directory.exists():
            error = f"{directory} does not exist (NEKRO_PLUGINS__DIRS)"
            none = Imported(path=str(directory), module="", package="", key=directory.name, error=error)
            yield Step(name=directory.name, path=none.path, work=partial(_itself, none))
            continue
        for source in discover(directory.absolute()):
            yield step(source, is_shipped=False)
    if entry_points:
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            yield Step(name=point.name, path=point.value, work=partial(import_entry_point, point))


def _itself(imported: Imported) -> Imported:
    return imported


@functools.cache
def loop_of_imports() -> asyncio.AbstractEventLoop:
    """Return what plugins get that ask for an event loop at import, as on a main thread; it never runs."""
    return asyncio.new_event_loop()


def close_loop_of_imports() -> None:
    """Close that loop, whose descriptors a fork would share; the next import gets another one."""
    loop_of_imports().close()
    loop_of_imports.cache_clear()


def import_step(step: Step) -> Imported:
    """Import one plugin as a worker does, however long it takes."""
    return _within(step, math.inf, lambda _: None)


def _within(
    step: Step, seconds: float, on_progress: Callable[[str], None], *, waits: bool = True
) -> Imported:
    """Import on a thread; after ``seconds`` return what says that the import goes on.

    Args:
        waits: False returns at once, because it is known to take longer.
    """
    result: Future[Imported] = Future()

    def work() -> None:
        asyncio.set_event_loop(loop_of_imports())
        try:
            result.set_result(step.work())
        except BaseException as exc:
            result.set_exception(exc)

    threading.Thread(target=work, name=f"nekro-import-{step.name}", daemon=True).start()
    end = time.monotonic() + (seconds if waits else 0.0)
    while not wait([result], timeout=min(PROGRESS_SECONDS, max(0.0, end - time.monotonic()))).done:
        on_progress(step.text)
        if time.monotonic() < end:
            continue
        error = (
            f"its import takes longer than {seconds:g} s (NEKRO_PLUGINS__START_SECONDS); it is loaded as soon"
            " as it is imported"
        )
        _log.bind(path=step.path, seconds=seconds).warning("plugin_import_slow")
        return Imported(
            path=step.path,
            module="",
            package="",
            key=step.name,
            error=error,
            source=step.source,
            later=result,
        )
    imported = result.result()
    if imported.error is not None and _NEEDS_MAIN_THREAD in imported.error:
        return step.work()
    return imported


def _unique(loaded: Imported, paths_by_key: dict[str, str]) -> Imported:
    """Refuse a key that another plugin has; the error names both paths."""
    if loaded.plugin is None:
        return loaded
    key = loaded.plugin.key
    first = paths_by_key.setdefault(key, loaded.path)
    if first == loaded.path:
        return loaded
    error = f"key {key} is taken: {first} has it, so {loaded.path} is refused; remove one of them"
    if key == BUILT_IN_PLUGIN:
        error = f"key {key} is that of the built-in methods; give {loaded.path} another author or module_name"
    _log.bind(path=loaded.path, error=error).error("plugin_not_loaded")
    return dataclasses.replace(loaded, key=key, plugin=None, error=error)
