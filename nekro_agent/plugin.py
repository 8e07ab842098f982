"""``NekroPlugin``: what a plugin is and what it registers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast, overload

from nekro_agent import layout, runtime
from nekro_agent.config import ConfigBase, ConfigFile
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import InvalidValueError
from nekro_agent.methods import Lane, SandboxMethod, SandboxMethodType
from nekro_agent.store import PluginStore

if TYPE_CHECKING:
    from loguru import Logger

__all__ = ["LANE_ATTRIBUTE", "NekroPlugin", "long_running"]

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=ConfigBase)
Config = TypeVar("Config", bound=type[ConfigBase])

#: Attribute of a function that :func:`long_running` sets; other hosts ignore it.
LANE_ATTRIBUTE: Final = "__nekro_lane__"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_log = get_sub_logger("plugin")


def long_running(func: F) -> F:
    """Mark a sandbox method as long: it runs in lane ``long``, off the ordinary methods' event loop.

    The order with ``mount_sandbox_method`` does not matter.
    """
    setattr(func, LANE_ATTRIBUTE, Lane.LONG)
    return func


class NekroPlugin:
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
            support_adapter: adapters whose chats see the methods; empty or None means all.
            allow_sleep: whether the methods may be hidden behind ``sleep_brief``.

        Raises:
            InvalidValueError: ``module_name`` or ``author`` is no ASCII identifier.
        """
        if isinstance(support_adapter, bool):  # seventh in API v1: is_builtin
            is_builtin, support_adapter = support_adapter, None
        self.name = name
        self.module_name = _checked_identifier("module_name", module_name)
        self.author = _checked_identifier("author", author)
        self.description = description.strip()
        self.version = version.strip()
        self.url = url.strip()
        self.support_adapter: list[str] = list(support_adapter or [])
        self.is_builtin = is_builtin
        self.is_package = is_package
        self.i18n_name = i18n_name
        self.i18n_description = i18n_description
        self.allow_sleep = allow_sleep
        self.sleep_brief = sleep_brief
        self.webui_path = webui_path
        self._is_enabled = True
        self._config: ConfigFile | None = None
        self._module_name = _caller_module()
        self.reset_methods()
        if unknown:
            _log.warning(
                f"{self.key}: unknown arguments of NekroPlugin ignored: {', '.join(sorted(unknown))}"
            )

    def __repr__(self) -> str:
        return f"<NekroPlugin {self.key} {self.version}>"

    @property
    def key(self) -> str:
        """``<author>.<module_name>``, unique in an installation."""
        return f"{self.author}.{self.module_name}"

    @property
    def is_enabled(self) -> bool:
        """Whether the operator has the plugin switched on."""
        return self._is_enabled

    def set_enabled(self, enabled: bool) -> None:
        """Record the operator's choice; the host runs the callbacks."""
        self._is_enabled = enabled

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
        directory = layout.plugin_dir(runtime.data_root(), self.key)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def get_plugin_path(self) -> Path:
        """Return the same directory as :meth:`get_plugin_data_dir`, under its older name."""
        return self.get_plugin_data_dir()

    def mount_config(self) -> Callable[[Config], Config]:
        """Register the configuration class and load, or create, its file at once.

        The file is ``<data root>/configs/<key>.yaml``.

        Raises:
            TypeError: the class does not derive from ``ConfigBase``.
            InvalidValueError: the file does not fit the class.
        """

        def decorate(cls: Config) -> Config:
            if not (isinstance(cls, type) and issubclass(cls, ConfigBase)):
                raise TypeError(f"{self.key}: mount_config needs a class that derives from ConfigBase")
            path = layout.config_file(runtime.data_root(), self.key)
            cls._config_key, cls._config_file_path = self.key, path
            self._config = ConfigFile(cls, path)
            return cls

        return decorate

    @overload
    def get_config(self) -> ConfigBase: ...
    @overload
    def get_config(self, config_class: type[C]) -> C: ...
    def get_config(self, config_class: type[ConfigBase] = ConfigBase) -> ConfigBase:
        """Return the configuration: the same object each time, with what other processes saved.

        Args:
            config_class: a type hint only.

        Raises:
            InvalidValueError: no configuration class is mounted.
        """
        if self._config is None:
            raise InvalidValueError(
                f"{self.key} has no configuration: mount a class with @plugin.mount_config()"
            )
        return self._config.refreshed()

    @property
    def config(self) -> ConfigBase:
        """The same as :meth:`get_config`."""
        return self.get_config()

    def save_config(self, config: ConfigBase) -> None:
        """Take over ``config`` and write the file; other processes see it at their next ``get_config``.

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

    # -- sandbox methods ------------------------------------------------------------------

    def mount_sandbox_method(
        self,
        method_type: SandboxMethodType | str,
        name: str,
        description: str = "",
        *,
        lane: Lane | str | None = None,
    ) -> Callable[[F], F]:
        """Register a method that sandboxed code can call; the function comes back unchanged.

        The first positional argument of the function receives the ``AgentCtx``, whatever its
        name. Sandboxed code calls it by the function's name.

        Args:
            method_type: what becomes of the result, see :class:`SandboxMethodType`.
            name: label for people; callable too when it is a free identifier.
            lane: queue of the calls, ``"long"`` for downloads and other long work; None leaves it
                to the installation.

        Raises:
            InvalidValueError: the type or the lane does not exist.
        """
        kind = _checked_member(SandboxMethodType, method_type)
        queue = None if lane is None else _checked_member(Lane, lane)

        def decorate(func: F) -> F:
            if not callable(func) or not hasattr(func, "__name__"):
                raise TypeError(f"{self.key}: mount_sandbox_method needs a function, not {func!r}")
            func._method_type = kind  # type: ignore[attr-defined]  # plugins of the reference read it
            if func.__name__ in self._methods:
                _log.warning(f"{self.key}: method {func.__name__} is registered again; the later one counts")
            self._methods[func.__name__] = SandboxMethod(
                method_type=kind, name=name, description=description, func=func, lane=queue
            )
            return func

        return decorate

    @property
    def sandbox_methods(self) -> list[SandboxMethod]:
        """Every registered method, in order of registration."""
        return list(self._methods.values())

    def mount_collect_methods(self) -> Callable[[F], F]:
        """Register ``async (ctx) -> list`` that chooses which methods a chat sees."""
        return self._slot("collect_methods")

    # -- hooks ----------------------------------------------------------------------------

    def mount_init_method(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs once per process after loading."""
        return self._slot("init")

    def mount_cleanup_method(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs when the process or the plugin stops."""
        return self._slot("cleanup")

    def mount_on_channel_reset(self) -> Callable[[F], F]:
        """Register ``async (ctx) -> None`` that runs when a chat is reset."""
        return self._slot("channel_reset")

    def mount_on_user_message(self) -> Callable[[F], F]:
        """Register ``async (ctx, ChatMessage) -> MsgSignal | None`` that sees each user message."""
        return self._slot("user_message")

    def mount_on_message(self) -> Callable[[F], F]:
        """Register the same as :meth:`mount_on_user_message`, under its v1 name."""
        return self._slot("user_message")

    def mount_on_system_message(self) -> Callable[[F], F]:
        """Register ``async (ctx, str) -> MsgSignal | None`` that sees each system message."""
        return self._slot("system_message")

    def mount_prompt_inject_method(self, name: str, description: str = "") -> Callable[[F], F]:
        """Register ``async (ctx) -> str`` whose text joins the prompt of every round."""
        return self._slot("prompt_inject")

    def mount_router(self) -> Callable[[F], F]:
        """Register a function that returns a FastAPI ``APIRouter``, for an HTTP process to serve."""
        return self._slot("router")

    def mount_webhook_method(self, endpoint: str, name: str, description: str = "") -> Callable[[F], F]:
        """Register ``async (ctx)`` that serves a webhook; ``ctx.webhook_request`` holds the request."""

        def decorate(func: F) -> F:
            self.webhook_methods[endpoint] = SandboxMethod(
                method_type=SandboxMethodType.TOOL, name=name, description=description, func=func
            )
            return func

        return decorate

    def on_enabled(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs when an operator enables the plugin."""
        return self._listener(self.enabled_callbacks)

    def on_disabled(self) -> Callable[[F], F]:
        """Register ``async () -> None`` that runs when an operator disables the plugin."""
        return self._listener(self.disabled_callbacks)

    def reset_methods(self) -> None:
        """Forget every registration; used before a reload."""
        self._methods: dict[str, SandboxMethod] = {}
        self._slots: dict[str, Callable[..., Any]] = {}
        self.webhook_methods: dict[str, SandboxMethod] = {}
        self.enabled_callbacks: list[Callable[[], Any]] = []
        self.disabled_callbacks: list[Callable[[], Any]] = []

    def hook(self, slot: str) -> Callable[..., Any] | None:
        """Return what is registered as ``init``, ``cleanup``, ``channel_reset``, …; for the host."""
        return self._slots.get(slot)

    def _slot(self, slot: str) -> Callable[[F], F]:
        def decorate(func: F) -> F:
            if slot in self._slots:
                _log.warning(f"{self.key}: {slot} is registered again; the later one counts")
            self._slots[slot] = func
            return func

        return decorate

    @staticmethod
    def _listener(listeners: list[Callable[[], Any]]) -> Callable[[F], F]:
        def decorate(func: F) -> F:
            listeners.append(func)
            return func

        return decorate


def _checked_identifier(field: str, value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if not _IDENTIFIER.fullmatch(text):
        raise InvalidValueError(
            f"NekroPlugin: {field}={value!r} must be letters, digits and underscores, the first no digit"
        )
    return text


E = TypeVar("E", SandboxMethodType, Lane)


def _checked_member(kind: type[E], value: object) -> E:
    try:
        return kind(cast("str", value))
    except ValueError:
        choices = ", ".join(member.value for member in kind)
        raise InvalidValueError(
            f"{kind.__name__} {value!r} does not exist; choose one of {choices}"
        ) from None


def _caller_module() -> str:
    """Name of the module that constructs the plugin, for its documentation."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))
