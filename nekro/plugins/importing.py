"""Imports one plugin from its source; an error is returned with its reason and a suggested fix.

The fix names the distribution of a missing module, whose name may differ from that of the module."""

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
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final, TextIO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nekro.plugins import onebot
from nekro.plugins.discovery import PluginSource, SourceKind
from nekro_agent import placeholders, runtime
from nekro_agent.commands.registration import kept
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import PluginLoadError
from nekro_agent.packages import contexts
from nekro_agent.packages.contexts import NAMESPACE, PluginImports
from nekro_agent.plugin import NekroPlugin

__all__ = [
    "SHIPPED",
    "Imported",
    "distribution_of",
    "import_entry_point",
    "import_plugin",
]


#: Top-level module, or module of a namespace package → distribution.
_DISTRIBUTIONS: Final = {
    "Crypto": "pycryptodome",
    "Cryptodome": "pycryptodomex",
    "MySQLdb": "mysqlclient",
    "OpenSSL": "pyOpenSSL",
    "PIL": "Pillow",
    "Xlib": "python-xlib",
    "attr": "attrs",
    "azure.identity": "azure-identity",
    "azure.storage.blob": "azure-storage-blob",
    "barcode": "python-barcode",
    "bilibili_api": "bilibili-api-python",
    "bs4": "beautifulsoup4",
    "bson": "pymongo",
    "cairo": "pycairo",
    "chinese_calendar": "chinesecalendar",
    "cpuinfo": "py-cpuinfo",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "discord": "discord.py",
    "dns": "dnspython",
    "docx": "python-docx",
    "dotenv": "python-dotenv",
    "engineio": "python-engineio",
    "faiss": "faiss-cpu",
    "ffmpeg": "ffmpeg-python",
    "fitz": "PyMuPDF",
    "gi": "PyGObject",
    "git": "GitPython",
    "github": "PyGithub",
    "gitlab": "python-gitlab",
    "google.cloud.storage": "google-cloud-storage",
    "google.genai": "google-genai",
    "google.generativeai": "google-generativeai",
    "google.oauth2": "google-auth",
    "google.protobuf": "protobuf",
    "googleapiclient": "google-api-python-client",
    "grpc": "grpcio",
    "haystack": "haystack-ai",
    "jose": "python-jose",
    "jpype": "JPype1",
    "jwt": "PyJWT",
    "ldap": "python-ldap",
    "llama_cpp": "llama-cpp-python",
    "lunar_python": "lunar-python",
    "magic": "python-magic",
    "markdown_it": "markdown-it-py",
    "mem0": "mem0ai",
    "memcache": "python-memcached",
    "multipart": "python-multipart",
    "mysql.connector": "mysql-connector-python",
    "nacl": "PyNaCl",
    "odf": "odfpy",
    "paho.mqtt": "paho-mqtt",
    "pkg_resources": "setuptools",
    "playhouse": "peewee",
    "pptx": "python-pptx",
    "psycopg2": "psycopg2-binary",
    "qdrant_client": "qdrant-client",
    "readability": "readability-lxml",
    "ruamel": "ruamel.yaml",
    "serial": "pyserial",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "slugify": "python-slugify",
    "socketio": "python-socketio",
    "socks": "PySocks",
    "speech_recognition": "SpeechRecognition",
    "talib": "TA-Lib",
    "tavily": "tavily-python",
    "telegram": "python-telegram-bot",
    "tencentcloud": "tencentcloud-sdk-python",
    "usb": "pyusb",
    "vlc": "python-vlc",
    "volcenginesdkarkruntime": "volcengine-python-sdk",
    "websocket": "websocket-client",
    "wx": "wxPython",
    "yaml": "PyYAML",
    "zmq": "pyzmq",
}


def distribution_of(module: str) -> str:
    """Return the distribution to install for a module; its top-level name unless another one is known."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        known = _DISTRIBUTIONS.get(".".join(parts[:length]))
        if known is not None:
            return known
    return parts[0]


SHIPPED: Final = "plugin_pkgs"
#: Failed imports that an error names.
_MAX_FAILURES: Final = 3
#: What plugins use to connect to a Qdrant server themselves.
_OF_QDRANT_SERVERS: Final = ("get_qdrant_config", "QDRANT_URL")

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
    source: PluginSource | None = None
    #: None for shipped plugins, entry points and plugins that failed.
    imports: PluginImports | None = None
    #: Result of an import that still runs; None when it has ended.
    later: Future[Imported] | None = None

    @property
    def is_shipped(self) -> bool:
        """Whether it is a module of ``plugin_pkgs``, which changes with a release only."""
        return self.package.startswith(f"{SHIPPED}.")


def import_plugin(source: PluginSource, *, is_shipped: bool = False, is_reload: bool = False) -> Imported:
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
        for command in kept(package):
            plugin.add_command(command)
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # a plugin's code may raise anything; the others must load
        error = _explain(exc, source.path)
        _log.bind(path=str(source.path), error=error).error("plugin_not_loaded")
        kept(package)  # drops them
        if context is not None:
            context.adopt_paths()
            context.forget()
        return dataclasses.replace(base, error=error)
    if context is not None:
        _record_losses(context)
        context.loaded()
    _record_missing(package)
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
        plugin.adopt_commands()
    except KeyboardInterrupt:
        raise
    except BaseException as exc:  # as in import_plugin
        error = _explain(exc, None)
        _log.bind(path=path, error=error).error("plugin_not_loaded")
        return dataclasses.replace(base, error=error)
    _record_missing(point.module)
    return dataclasses.replace(base, key=plugin.key, plugin=plugin)


def _record_missing(package: str) -> None:
    """Record the functions and values that a plugin's modules name and that need a setting which is unset."""
    if runtime.core_config().QDRANT_URL:
        return
    for name, module in sys.modules.copy().items():
        file = getattr(module, "__file__", None)
        if (name == package or name.startswith(f"{package}.")) and file:
            with contextlib.suppress(OSError):
                text = Path(file).read_bytes()
                for used in (used for used in _OF_QDRANT_SERVERS if used.encode() in text):
                    placeholders.record_missing(name, f"{used} (no Qdrant server: set NEKRO_QDRANT__URL)")


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send to stderr what is written to stdout in the block, also by subprocesses and C libraries.

    A plugin that prints during its import must not write into the output of a command. Blocks on several
    threads overlap; the last one restores the streams.
    """
    with _REDIRECTION:
        yield


class _Redirection:
    """The redirection of stdout while any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._begin()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore.close()

    def _begin(self) -> None:
        restore = self._restore
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            sys.stdout.flush()
            kept = os.dup(1)
            restore.callback(os.close, kept)
            restore.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
            restore.callback(_flush, sys.stdout)
        before, sys.stdout = sys.stdout, sys.stderr
        restore.callback(_put_back, before, sys.stderr)


_REDIRECTION: Final = _Redirection()


def _put_back(before: TextIO, redirected: TextIO) -> None:
    """Restore stdout, unless the process has replaced it meanwhile."""
    if sys.stdout is redirected:
        sys.stdout = before


def _flush(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def _names(source: PluginSource) -> tuple[str, str]:
    """Return an unused package name, and the name of the module with ``plugin``."""
    slug = re.sub(r"\W", "_", source.name)
    package, number = f"{NAMESPACE}.{slug}", 2
    while package in sys.modules:
        package, number = f"{NAMESPACE}.{slug}_{number}", number + 1
    if source.kind is SourceKind.PACKAGE:
        return package, package
    return package, f"{package}.{slug if source.kind is SourceKind.FILE else 'plugin'}"


def _executed(source: PluginSource, name: str, context: PluginImports) -> ModuleType:
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


def _record_losses(context: PluginImports) -> None:
    """Record what the plugin does without, since it guards imports that failed."""
    for failure in context.failures or ():
        is_here_now = failure.missing is not None and contexts.is_importable(failure.missing)
        if not is_here_now and not placeholders.is_replaced(failure.file, failure.line):
            is_on_index = failure.missing is not None and not _is_of_the_reference(failure.missing)
            fix = f"; install {distribution_of(failure.missing or '')}" if is_on_index else ""
            placeholders.record_lost(context.package, failure.name, f"{failure.text}{fix}")


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
        fix = f" — {_how_to_install(missing)}" if missing and not _is_of_the_reference(missing) else ""
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


def _is_of_the_reference(module: str) -> bool:
    """Whether no package of the index has a module, because it is one of Nekro Agent or its framework."""
    return module.partition(".")[0] in placeholders.ROOTS


def _how_to_install(module: str) -> str:
    """Return the command that installs the package of a missing module for this installation."""
    distribution = distribution_of(module)
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
