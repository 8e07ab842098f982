"""Finds and imports plugins; a failure is recorded with its reason and does not stop other plugins."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Final

from nekro_agent import placeholders, runtime
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import PluginLoadError
from nekro_agent.plugin import NekroPlugin
from nekro_agent.policies import PackagePolicy
from workers.plugins.discovery import Source, SourceKind, discover

__all__ = [
    "ENTRY_POINT_GROUP",
    "LoadedPlugins",
    "PluginRecord",
    "PluginStatus",
    "load_plugins",
    "unload_plugins",
]

ENTRY_POINT_GROUP: Final = "nekro_agent.plugins"
#: Parent package of the import names of plugins from folders.
_NAMESPACE: Final = "nekro_plugins"
_SHIPPED: Final = "plugin_pkgs"

_log = get_sub_logger("loader")


class PluginStatus(StrEnum):
    """Result of loading a plugin."""

    OK = "ok"
    #: It works, except where it uses Nekro Agent names that do not exist here.
    DEGRADED = "degraded"
    FAILED = "failed"
    #: Loaded, but switched off by an operator.
    DISABLED = "disabled"


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    path: str
    module: str
    plugin: NekroPlugin | None = None
    key: str = ""
    error: str | None = None


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


class LoadedPlugins:
    """The result of :func:`load_plugins`, in loading order."""

    def __init__(self, found: Iterable[_Loaded]) -> None:
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
    def modules(self) -> list[str]:
        """Import names of the plugins' modules."""
        return [loaded.module for loaded in self._found if loaded.module]

    def add_error(self, plugin_key: str, error: str) -> None:
        """Record that a plugin's init failed; it is listed as failed and keeps its methods."""
        self._init_errors[plugin_key] = error

    def _record(self, loaded: _Loaded) -> PluginRecord:
        names = placeholders.used_by(loaded.module)
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
    found: list[_Loaded] = []
    paths_by_key: dict[str, str] = {}
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
        _log.warning(result.warnings[-1])
    return result


def unload_plugins(loaded: LoadedPlugins) -> None:
    """Drop the plugins' modules, so that loading them again executes their files again."""
    for module in loaded.modules:
        _forget_modules(module)
        placeholders.forget(module)


def _load_all(dirs: Iterable[Path], *, shipped: bool, entry_points: bool) -> Iterator[_Loaded]:
    if shipped:
        package = importlib.import_module(_SHIPPED)
        for source in discover(Path(package.__path__[0])):
            yield _load(source, f"{_SHIPPED}.{source.name}")
    for directory in dirs:
        if not directory.exists():
            error = f"{directory} does not exist (NEKRO_PLUGINS__DIRS)"
            yield _Loaded(path=str(directory), module="", key=directory.name, error=error)
            continue
        for source in discover(directory.absolute()):
            yield _load(source, _free_name(source.name))
    if entry_points:
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            yield _load_entry_point(point)


def _load(source: Source, module_name: str) -> _Loaded:
    try:
        with placeholders.loading():
            module = _import_source(source, module_name)
        plugin = _plugin_of(module, source.path)
    except (Exception, SystemExit) as exc:  # a plugin's code may raise anything; the others must load
        _forget_modules(module_name)
        error = _explain(exc, source.path)
        _log.error(f"plugin {source.path} failed to load: {error}")
        return _Loaded(path=str(source.path), module=module_name, key=source.name, error=error)
    return _Loaded(path=str(source.path), module=module_name, plugin=plugin, key=plugin.key)


def _load_entry_point(point: importlib.metadata.EntryPoint) -> _Loaded:
    path = f"{point.dist.name if point.dist else 'entry point'}: {point.value}"
    try:
        with placeholders.loading():
            target = point.load()
        plugin = target if isinstance(target, NekroPlugin) else _plugin_of(target, Path(point.value))
    except (Exception, SystemExit) as exc:  # as in _load
        error = _explain(exc, None)
        _log.error(f"plugin {path} failed to load: {error}")
        return _Loaded(path=path, module=point.module, key=point.name, error=error)
    return _Loaded(path=path, module=point.module, plugin=plugin, key=plugin.key)


def _import_source(source: Source, module_name: str) -> ModuleType:
    """Import a source under ``module_name``; files are read as UTF-8 with or without a BOM."""
    if module_name.startswith(f"{_SHIPPED}."):
        return importlib.import_module(module_name)
    _ensure_namespace()
    if source.kind is SourceKind.FILE:
        return _execute(module_name, source.path, None)
    if source.kind is SourceKind.PACKAGE:
        module = _execute(module_name, source.path / "__init__.py", source.path)
        if (
            isinstance(getattr(module, "plugin", None), NekroPlugin)
            or not (source.path / "plugin.py").is_file()
        ):
            return module
        return importlib.import_module(f"{module_name}.plugin")
    folder = ModuleType(module_name)
    folder.__path__ = [str(source.path)]
    sys.modules[module_name] = folder
    return importlib.import_module(f"{module_name}.plugin")


def _execute(module_name: str, file: Path, package_dir: Path | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        module_name, file, submodule_search_locations=[str(package_dir)] if package_dir else None
    )
    if spec is None or spec.loader is None:
        raise PluginLoadError(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _plugin_of(module: ModuleType, path: Path) -> NekroPlugin:
    plugin = getattr(module, "plugin", None)
    if isinstance(plugin, NekroPlugin):
        return plugin
    found = "has no module-level name `plugin`" if plugin is None else f"`plugin` is {type(plugin).__name__}"
    raise PluginLoadError(f"{path.name} {found}; it must be the NekroPlugin instance")


def _unique(loaded: _Loaded, paths_by_key: dict[str, str]) -> _Loaded:
    """Refuse a key that another plugin has; the error names both paths."""
    if loaded.plugin is None:
        return loaded
    key = loaded.plugin.key
    first = paths_by_key.setdefault(key, loaded.path)
    if first == loaded.path:
        return loaded
    error = f"key {key} is taken: {first} has it, so {loaded.path} is refused; remove one of them"
    _log.error(error)
    return _Loaded(path=loaded.path, module=loaded.module, key=key, error=error)


def _ensure_namespace() -> None:
    if _NAMESPACE not in sys.modules:
        namespace = ModuleType(_NAMESPACE)
        namespace.__path__ = []
        sys.modules[_NAMESPACE] = namespace


def _free_name(name: str) -> str:
    """Return an unused import name."""
    slug = re.sub(r"\W", "_", name)
    candidate, number = f"{_NAMESPACE}.{slug}", 2
    while candidate in sys.modules:
        candidate, number = f"{_NAMESPACE}.{slug}_{number}", number + 1
    return candidate


def _forget_modules(module_name: str) -> None:
    """Drop a failed plugin's partly initialised modules, so that a later import starts from scratch."""
    for name in [n for n in sys.modules if n == module_name or n.startswith(module_name + ".")]:
        del sys.modules[name]


def _explain(exc: BaseException, path: Path | None) -> str:
    """Return one line: the plugin's file and line, the error, and a suggested fix where one is known."""
    if isinstance(exc, SyntaxError):
        file = Path(exc.filename or path or "?").name
        where = f"{file}, line {exc.lineno}" if exc.lineno else file
        return f"{where}: {type(exc).__name__}: {exc.msg}"
    text = f"{type(exc).__name__}: {exc}".rstrip(": ")
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        top = exc.name.partition(".")[0]
        text += f" — install it for the workers, or let the plugin call dynamic_import_pkg({top!r})"
    if path is not None:
        own = [f for f in traceback.extract_tb(exc.__traceback__) if Path(f.filename).is_relative_to(path)]
        if own:
            text = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: {text}"
    return text
