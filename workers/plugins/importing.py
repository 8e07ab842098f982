"""Imports one plugin from its source; an error is returned with its reason and a suggested fix."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, TextIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nekro_agent import placeholders
from nekro_agent.commands import onebot
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import PluginLoadError
from nekro_agent.packages import contexts
from nekro_agent.packages.contexts import NAMESPACE, PluginImports
from nekro_agent.plugin import NekroPlugin
from workers.plugins.discovery import Source, SourceKind

__all__ = ["SHIPPED", "Imported", "import_entry_point", "import_plugin"]

SHIPPED: Final = "plugin_pkgs"
#: Distributions of modules whose names differ, for the packages of the extra ``plugins`` and common others.
_DISTRIBUTIONS: Final = {
    "PIL": "Pillow",
    "bs4": "beautifulsoup4",
    "chinese_calendar": "chinesecalendar",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "discord": "discord.py",
    "docx": "python-docx",
    "fitz": "PyMuPDF",
    "git": "GitPython",
    "googleapiclient": "google-api-python-client",
    "jose": "python-jose",
    "jwt": "PyJWT",
    "lunar_python": "lunar-python",
    "magic": "python-magic",
    "multipart": "python-multipart",
    "psycopg2": "psycopg2-binary",
    "qdrant_client": "qdrant-client",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "telegram": "python-telegram-bot",
    "websocket": "websocket-client",
    "yaml": "PyYAML",
    "Crypto": "pycryptodome",
}
#: Failed imports that an error names.
_MAX_FAILURES: Final = 3
_OUR_DISTRIBUTION: Final = "nekro-workers"
_EXTRA: Final = "plugins"

_log = get_sub_logger("loader")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """One plugin that was imported, or the reason why it was not."""

    path: str
    #: Import name of the module with ``plugin``, and of the package that holds all modules of the plugin.
    module: str
    package: str
    key: str
    plugin: NekroPlugin | None = None
    error: str | None = None
    #: None for an entry point, and for a folder that does not exist.
    source: Source | None = None
    #: None for shipped plugins, entry points and plugins that failed.
    imports: PluginImports | None = None

    @property
    def is_shipped(self) -> bool:
        """Whether it is a module of ``plugin_pkgs``, which changes with a release only."""
        return self.package.startswith(f"{SHIPPED}.")


def import_plugin(source: Source, *, is_shipped: bool = False, is_reload: bool = False) -> Imported:
    """Import a plugin under names that no other plugin has, and not those of an earlier import of it.

    Args:
        is_shipped: whether it is a module of ``plugin_pkgs``.
        is_reload: whether its files may have changed since this process imported them.
    """
    contexts.install()
    onebot.install()
    context: PluginImports | None = None
    if is_shipped:
        package = name = f"{SHIPPED}.{source.name}"
    else:
        package, name = _names(source)
        folder = source.path.parent if source.kind is SourceKind.FILE else source.path
        is_package = source.kind is not SourceKind.FILE
        context = PluginImports(package, folder, is_package=is_package, reads_bytecode=not is_reload)
    base = Imported(path=str(source.path), module=name, package=package, key=source.name, source=source)
    try:
        with placeholders.loading(), stdout_to_stderr():
            module = _executed(source, name, context) if context else importlib.import_module(name)
        plugin = _plugin_of(module, source.path.name, context)
        for command in onebot.registered(package):
            plugin.add_command(command)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # a plugin's code may raise anything; the others must load
        error = _explain(exc, source.path)
        _log.bind(path=str(source.path), error=error).error("plugin_not_loaded")
        onebot.registered(package)  # drops them
        if context is not None:
            context.adopt_paths()
            context.forget()
        return dataclasses.replace(base, error=error)
    if context is not None:
        context.loaded()
    return dataclasses.replace(base, module=module.__name__, key=plugin.key, plugin=plugin, imports=context)


def import_entry_point(point: importlib.metadata.EntryPoint) -> Imported:
    """Import the plugin of an installed distribution."""
    path = f"{point.dist.name if point.dist else 'entry point'}: {point.value}"
    base = Imported(path=path, module=point.module, package=point.module, key=point.name)
    contexts.add_installed(name=point.module.partition(".")[0])
    try:
        with placeholders.loading(), stdout_to_stderr():
            target = point.load()
        plugin = target if isinstance(target, NekroPlugin) else _plugin_of(target, point.value, None)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # as in import_plugin
        error = _explain(exc, None)
        _log.bind(path=path, error=error).error("plugin_not_loaded")
        return dataclasses.replace(base, error=error)
    return dataclasses.replace(base, key=plugin.key, plugin=plugin)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is written to stdout in the block, also by subprocesses and C libraries.

    A plugin that prints during its import must not write into the output of a command.
    """
    with contextlib.ExitStack() as restore:
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            sys.stdout.flush()
            kept = os.dup(1)
            restore.callback(os.close, kept)
            restore.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
            restore.callback(_flush, sys.stdout)
        restore.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def _names(source: Source) -> tuple[str, str]:
    """Return an unused package name, and the name of the module with ``plugin``."""
    slug = re.sub(r"\W", "_", source.name)
    package, number = f"{NAMESPACE}.{slug}", 2
    while package in sys.modules:
        package, number = f"{NAMESPACE}.{slug}_{number}", number + 1
    if source.kind is SourceKind.PACKAGE:
        return package, package
    return package, f"{package}.{slug if source.kind is SourceKind.FILE else 'plugin'}"


def _executed(source: Source, name: str, context: PluginImports) -> ModuleType:
    """Execute the plugin's code; files are read as UTF-8 with or without a BOM."""
    if source.kind is SourceKind.PACKAGE:
        init = source.path / "__init__.py"
        module = contexts.executed(name, init, context, package_dir=source.path)
        if (
            isinstance(getattr(module, "plugin", None), NekroPlugin)
            or not (source.path / "plugin.py").is_file()
        ):
            return module
        return importlib.import_module(f"{name}.plugin")
    folder = source.path.parent if source.kind is SourceKind.FILE else source.path
    contexts.make_package(context.package, [str(folder)])
    file = source.path if source.kind is SourceKind.FILE else source.path / "plugin.py"
    return contexts.executed(name, file, context)


def _plugin_of(module: ModuleType, name: str, context: PluginImports | None) -> NekroPlugin:
    plugin = getattr(module, "plugin", None)
    if isinstance(plugin, NekroPlugin):
        return plugin
    if plugin is not None:
        raise PluginLoadError(
            f"{name}: `plugin` is {type(plugin).__name__}; it must be the NekroPlugin instance"
        )
    failures = list(dict.fromkeys(context.failures or ())) if context else []
    if failures:
        state = "sets `plugin` to None" if "plugin" in vars(module) else "does not bind `plugin`"
        reasons = "; ".join(failure.text for failure in failures[:_MAX_FAILURES])
        missing = next((failure.missing for failure in failures if failure.missing), None)
        fix = f" — {_how_to_install(missing)}" if missing else ""
        raise PluginLoadError(f"{name} {state} after an import that it guards failed: {reasons}{fix}")
    raise PluginLoadError(f"{name} has no module-level name `plugin`; it must be the NekroPlugin instance")


def _explain(exc: BaseException, path: Path | None) -> str:
    """Return one line: the plugin's file and line, the error, and a suggested fix where one is known."""
    if isinstance(exc, SyntaxError):
        file = Path(exc.filename or path or "?").name
        where = f"{file}, line {exc.lineno}" if exc.lineno else file
        return f"{where}: {type(exc).__name__}: {exc.msg}"
    text = f"{type(exc).__name__}: {exc}".rstrip(": ")
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        text += f" — {_how_to_install(exc.name)}"
    if path is not None:
        folder = path if path.is_dir() else path.parent
        own = [f for f in traceback.extract_tb(exc.__traceback__) if Path(f.filename).is_relative_to(folder)]
        if own:
            text = f"{Path(own[-1].filename).name}, line {own[-1].lineno}: {text}"
    return text


def _how_to_install(module: str) -> str:
    """Return the command that installs the package of a missing module for this installation."""
    top = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(top, top)
    wanted = f"{_OUR_DISTRIBUTION}[{_EXTRA}]" if _is_in_extra(distribution) else distribution
    has_pip = importlib.util.find_spec("pip") is not None
    tool = (
        [sys.executable, "-m", "pip", "install"]
        if has_pip
        else ["uv", "pip", "install", "--python", sys.executable]
    )
    command = shlex.join([*tool, wanted])
    return (
        f"install it for the workers: {command}; or let the plugin call dynamic_import_pkg({distribution!r})"
    )


def _is_in_extra(distribution: str) -> bool:
    try:
        needed = [Requirement(text) for text in importlib.metadata.requires(_OUR_DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:  # run from a folder that is not installed
        return False
    name = canonicalize_name(distribution)
    return any(
        canonicalize_name(requirement.name) == name
        and requirement.marker is not None
        and not requirement.marker.evaluate({"extra": ""})
        and requirement.marker.evaluate({"extra": _EXTRA})
        for requirement in needed
    )
