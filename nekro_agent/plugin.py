"""``NekroPlugin``: a plugin's identity, services and registrations; and which plugin's code runs.

An old version of a plugin is cleaned up only after its last run.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, overload
from weakref import WeakKeyDictionary

from nekro_agent import layout, runtime
from nekro_agent.config import ConfigBase, ConfigFile
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.execution.current import Holding
from nekro_agent.files.private_files import make_directory
from nekro_agent.mounts import PluginMounts, long_running, repeatable
from nekro_agent.store import PluginStore

if TYPE_CHECKING:
    from loguru import Logger

__all__ = [
    "NekroPlugin",
    "is_in_use",
    "long_running",
    "plugin_in_use",
    "repeatable",
    "using",
]


C = TypeVar("C", bound=ConfigBase)

Config = TypeVar("Config", bound=type[ConfigBase])

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Packages that hold each plugin as a package or module of its own.
_CONTAINERS: Final = ("nekro_plugins.", "plugin_pkgs.")

_log = get_sub_logger("plugin")


class NekroPlugin(PluginMounts):
    """One plugin: its identity, its services (``store``, config, data directory) and its registrations."""

    def __init__(
        self,
        name: str,
        module_name: str,
        description: str,
        version: str,
        author: str,
        url: str = "",
        support_adapter: list[str] | bool | None = None,
        is_builtin: bool = False,
        is_package: bool = False,
        i18n_name: dict[str, str] | None = None,
        i18n_description: dict[str, str] | None = None,
        allow_sleep: bool | None = None,
        sleep_brief: str = "",
        webui_path: str | Path | None = None,
        **unknown: object,
    ) -> None:
        """Describe the plugin; its key is ``<author>.<module_name>``.

        Args:
            module_name: ASCII identifier, like ``author``.
            support_adapter: adapters whose chats have access to the methods; empty or None means all.
            allow_sleep: whether the methods may be hidden behind ``sleep_brief``.

        Raises:
            InvalidValueError: ``module_name`` or ``author`` is not an ASCII identifier.
        """
        if isinstance(support_adapter, bool):  # the seventh parameter of API v1 is is_builtin
            is_builtin, support_adapter = support_adapter, None
        self.name = name
        self.module_name = _checked_identifier("module_name", module_name)
        self.author = _checked_identifier("author", author)
        self.description, self.version, self.url = (
            "" if value is None else str(value).strip() for value in (description, version, url)
        )
        self.support_adapter: list[str] = list(support_adapter or [])
        self.is_builtin = is_builtin
        self.is_package = is_package
        self.i18n_name = i18n_name
        self.i18n_description = i18n_description
        self.allow_sleep = allow_sleep
        self.sleep_brief = sleep_brief
        self.webui_path = webui_path
        self._is_pinned = False
        self._is_enabled = True
        self._config: ConfigFile | None = None
        self._module_name = _caller_module()
        self.reset_methods()
        if unknown:
            ignored = ", ".join(sorted(unknown))
            _log.bind(plugin=self.key, arguments=ignored).warning("unknown_plugin_arguments_ignored")

    def __repr__(self) -> str:
        return f"<NekroPlugin {self.key} {self.version}>"

    @property
    def key(self) -> str:
        """``<author>.<module_name>``, unique in an installation."""
        return f"{self.author}.{self.module_name}"

    @property
    def pinned(self) -> bool:
        """Whether the plugin runs in only one process of the fleet.

        For background loops that ``init`` starts, and for state in memory. Set it after the constructor;
        other hosts ignore it. A plugin with ``on_enabled`` hooks is pinned in any case: what they set up
        exists in the process that runs them.
        """
        return self._is_pinned or bool(self.enabled_callbacks)

    @pinned.setter
    def pinned(self, pinned: bool) -> None:
        self._is_pinned = bool(pinned)

    @property
    def package(self) -> str:
        """Import name of the package or module that holds all code of the plugin; for the host."""
        depth = 2 if self._module_name.startswith(_CONTAINERS) else 1
        return ".".join(self._module_name.split(".")[:depth])

    @property
    def module(self) -> str:
        """Import name of the module that constructs the plugin; for the host."""
        return self._module_name

    @property
    def is_enabled(self) -> bool:
        """Whether the plugin is enabled by the operator."""
        return self._is_enabled

    def set_enabled(self, enabled: bool) -> None:
        """Record the operator's choice; the host runs the callbacks."""
        self._is_enabled = enabled

    def serves(self, adapter_key: str | None) -> bool:
        """Whether the plugin is available in chats of an adapter: in all unless it names its adapters.

        A chat whose adapter is not known has every plugin: it belongs to an application of its own or to
        the command line, and a plugin that needs its adapter says so itself.
        """
        return not self.support_adapter or not adapter_key or adapter_key in self.support_adapter

    @property
    def logger(self) -> Logger:
        """Logger whose records name this plugin."""
        return get_sub_logger(self.key, plugin_key=self.key)

    @property
    def store(self) -> PluginStore:
        """Key-value store of this plugin."""
        return PluginStore(self.key)

    # -- files and configuration ----------------------------------------------------------

    def get_plugin_data_dir(self) -> Path:
        """Return this plugin's own directory, ``<data root>/plugins/<key>``; it exists."""
        if runtime.is_bound():
            return runtime.current().areas.plugin_dir(self.key)
        return make_directory(layout.plugin_dir(runtime.data_root(), self.key))

    def get_plugin_path(self) -> Path:
        """Like :meth:`get_plugin_data_dir`, under its older name."""
        return self.get_plugin_data_dir()

    def mount_config(self) -> Callable[[Config], Config]:
        """Register the configuration class and read its file, if there is one.

        The file is ``<data root>/configs/<key>.yaml``. It is written when a worker starts the
        plugin, with the defaults of missing fields; importing the plugin writes nothing.

        Raises:
            TypeError: the class does not derive from ``ConfigBase``.
            InvalidValueError: the file does not match the class.
        """

        def decorate(cls: Config) -> Config:
            if not (isinstance(cls, type) and issubclass(cls, ConfigBase)):
                raise TypeError(f"{self.key}: mount_config needs a class that derives from ConfigBase")
            self._config = ConfigFile(cls, self.key)
            cls._config_key = self.key
            return cls

        return decorate

    @property
    def config_file(self) -> ConfigFile | None:
        """The mounted configuration with its file, for the host; None without one."""
        return self._config

    @overload
    def get_config(self) -> ConfigBase: ...
    @overload
    def get_config(self, config_class: type[C]) -> C: ...
    def get_config(self, config_class: type[ConfigBase] = ConfigBase) -> ConfigBase:
        """Return the configuration: the same object each time, including what other processes saved.

        Args:
            config_class: only a type hint.

        Raises:
            InvalidValueError: no configuration class is mounted.
        """
        if self._config is None:
            raise InvalidValueError(
                f"{self.key} has no configuration: mount a class with @plugin.mount_config()"
            )
        return self._config.refreshed()

    def refresh_config(self) -> None:
        """Copy what another process saved into the object of :meth:`get_config`.

        Hosts call it before they run code of the plugin. An unreadable or invalid file is logged and
        changes nothing.
        """
        if self._config is None:
            return
        try:
            self._config.refreshed()
        except InvalidValueError as exc:
            # The configuration read before stays in effect.
            _log.bind(plugin=self.key, error=str(exc)).error("configuration_not_reloaded")

    @property
    def config(self) -> ConfigBase:
        """Like :meth:`get_config`."""
        return self.get_config()

    def save_config(self, config: ConfigBase) -> None:
        """Use ``config`` and write the file.

        Every process of this data directory sees it from its next call, hook, command or job of the plugin
        on, and at once through ``get_config``; this includes an object that ``get_config`` returned before.
        Of two processes that save at the same time, the last one wins.

        Raises:
            TypeError: ``config`` is not an instance of the mounted class.
        """
        if self._config is None or not isinstance(config, self._config.cls):
            expected = self._config.cls.__name__ if self._config else "the mounted class (none is mounted)"
            raise TypeError(
                f"{self.key}: save_config needs an instance of {expected}, not {type(config).__name__}"
            )
        self._config.save(config)

    def get_vector_collection_name(self, key: str = "") -> str:
        """Return ``<plugin key>-<key>``, a name that no other plugin uses in a vector database."""
        return f"{self.key}-{key}"

    def get_docs(self) -> str:
        """Return the README beside the plugin's module, else the module's docstring, else ""."""
        module = sys.modules.get(self._module_name)
        file = getattr(module, "__file__", None)
        if file:
            readme = Path(file).with_name("README.md")
            if readme.is_file():
                return readme.read_text("utf-8", errors="replace")
        return (getattr(module, "__doc__", None) or "").strip()


def _checked_identifier(field: str, value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not _IDENTIFIER.fullmatch(text):
        raise InvalidValueError(
            f"NekroPlugin: {field}={value!r} must be letters, digits and underscores, with no digit first"
        )
    return text


def _caller_module() -> str:
    """Name of the module that constructs the plugin, for its documentation."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))


_lock: Final = threading.Lock()

_plugin: Final[ContextVar[NekroPlugin | None]] = ContextVar("nekro_plugin_in_use", default=None)

_runs: Final[WeakKeyDictionary[NekroPlugin, int]] = WeakKeyDictionary()


class _Using(Holding["NekroPlugin | None"]):
    __slots__ = ("_used",)

    def __init__(self, plugin: NekroPlugin) -> None:
        super().__init__(_plugin, plugin)
        self._used = plugin

    def __enter__(self) -> None:
        with _lock:
            _runs[self._used] = _runs.get(self._used, 0) + 1
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        with _lock:
            _runs[self._used] -= 1


def using(plugin: NekroPlugin) -> AbstractContextManager[None]:
    """Count the block as a run of the plugin's code; on any thread."""
    return _Using(plugin)


def plugin_in_use() -> NekroPlugin | None:
    """Return the plugin whose code runs, also in tasks and threads that it has started; None for others."""
    return _plugin.get()


def is_in_use(plugin: NekroPlugin) -> bool:
    """Whether code of the plugin runs: a method, a command, a hook or a job."""
    with _lock:
        return _runs.get(plugin, 0) > 0
