"""Finds and imports plugins; a failure is recorded with its reason and does not stop other plugins."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nekro_agent import placeholders, runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.methods import BUILT_IN_PLUGIN
from nekro_agent.plugin import NekroPlugin
from nekro_agent.policies import PackagePolicy
from workers.catalogue.entries import PluginStatus
from workers.plugins.discovery import discover
from workers.plugins.importing import SHIPPED, Imported, import_entry_point, import_plugin

__all__ = [
    "ENTRY_POINT_GROUP",
    "LoadedPlugins",
    "PluginRecord",
    "PluginStatus",
    "forget",
    "load_plugins",
]

ENTRY_POINT_GROUP: Final = "nekro_agent.plugins"

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


class LoadedPlugins:
    """The result of :func:`load_plugins`, in loading order."""

    def __init__(self, found: Iterable[Imported]) -> None:
        self._found = list(found)
        self._init_errors: dict[str, str] = {}
        #: Messages for operators that concern no single plugin.
        self.warnings: list[str] = []

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

    def replace(self, old: Imported, new: Imported) -> None:
        """List a new version of a plugin instead of the old one, without the errors of its init."""
        self._found[self._found.index(old)] = new
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
        if error is not None:
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
) -> LoadedPlugins:
    """Import every plugin: the shipped ones, those of ``dirs`` in order, then installed entry points.

    Args:
        dirs: plugins, or folders that hold plugins (see :mod:`workers.plugins.discovery`).
        disabled: keys of plugins that load but offer no methods.
        entry_points: whether to load from installed distributions (group ``nekro_agent.plugins``;
            the object is a module with ``plugin``, or the plugin).
        data_dir: data root for plugins that need it during their import, when no runtime is
            bound yet.
        packages: what plugins may install during their import.
    """
    placeholders.install()
    if data_dir is not None and not runtime.is_bound():
        runtime.prepare(data_dir=data_dir, packages=packages)
    found: list[Imported] = []
    paths_by_key = {BUILT_IN_PLUGIN: ""}
    for loaded in _load_all(dirs, shipped=shipped, entry_points=entry_points):
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


def forget(imported: Imported) -> None:
    """Drop the modules of one plugin, and what is known of its placeholders."""
    if imported.imports is not None:
        imported.imports.forget()
    elif imported.package:
        for name in [n for n in sys.modules if n == imported.package or n.startswith(f"{imported.package}.")]:
            del sys.modules[name]
    placeholders.forget(imported.package)


def _load_all(dirs: Iterable[Path], *, shipped: bool, entry_points: bool) -> Iterator[Imported]:
    if shipped:
        package = importlib.import_module(SHIPPED)
        for source in discover(Path(package.__path__[0])):
            yield import_plugin(source, is_shipped=True)
    for directory in dirs:
        if not directory.exists():
            error = f"{directory} does not exist (NEKRO_PLUGINS__DIRS)"
            yield Imported(path=str(directory), module="", package="", key=directory.name, error=error)
            continue
        for source in discover(directory.absolute()):
            yield import_plugin(source)
    if entry_points:
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            yield import_entry_point(point)


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
