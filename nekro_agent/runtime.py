"""The services behind the SDK, its limits and permissions, as one bundle that is bound per process.

Plugins do not use this module. The application fills limits and permissions from settings, and binds a
:class:`Runtime` when it starts (``workers.services``; in tests of plugins, ``nekro_agent.testing``). During
the import of plugins, before a runtime is bound, only the data root and the package policy are available."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from packaging.utils import canonicalize_name

from nekro_agent.errors import RuntimeNotBoundError
from nekro_agent.ports import (
    CronJobs,
    Downloads,
    FileAreas,
    Intake,
    Jobs,
    KeyValueStore,
    Messages,
    ModelBudget,
    SystemMessageHooks,
    Timers,
)
from nekro_agent.records import Records

if TYPE_CHECKING:
    from nekro_agent.packages.layers import FleetPackages

__all__ = [
    "CoreConfig",
    "DownloadPolicy",
    "ModelConfigGroup",
    "ModelGroups",
    "PackagePolicy",
    "Runtime",
    "StorePolicy",
    "UploadPolicy",
    "bind",
    "bound",
    "current",
    "data_root",
    "group_name",
    "group_variable",
    "is_bound",
    "package_policy",
    "prepare",
    "unbind",
]


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """Limits of ``plugin.store``."""

    max_value_bytes: int = 16 << 20


@dataclass(frozen=True, kw_only=True)
class DownloadPolicy:
    """Limits of downloads by URL, and options of their execution."""

    max_bytes: int = 20 << 30
    #: Longest time without data from a server.
    timeout_seconds: float = 60
    #: Host names and networks (CIDR) that are allowed although private, loopback or link-local.
    allow_private: tuple[str, ...] = ()
    #: Connections to one server for one large file.
    connections: int = 4
    #: A file of this size or more is large.
    parallel_min_bytes: int = 64 << 20
    #: Consecutive attempts without new data before a download fails.
    tries: int = 5
    #: Half the pause before the second attempt; doubles with each further one.
    retry_seconds: float = 0.5


@dataclass(frozen=True, kw_only=True)
class UploadPolicy:
    """Quota of the uploads of one chat."""

    chat_bytes: int = 1 << 30
    #: Files and directories.
    chat_names: int = 2_000


@dataclass(frozen=True, kw_only=True)
class PackagePolicy:
    """What ``dynamic_import_pkg`` may install, and where from besides the package index."""

    #: Distribution names; ``"*"`` allows all, an empty tuple none.
    allow: tuple[str, ...] = ("*",)
    #: Packages that other hosts have installed; None: all hosts share the data directory.
    fleet: FleetPackages | None = None

    def allows(self, name: str) -> bool:
        """Whether a distribution may be installed."""
        return "*" in self.allow or canonicalize_name(name) in map(canonicalize_name, self.allow)


@dataclass(frozen=True, kw_only=True)
class ModelConfigGroup:
    """One model in the form that plugins of the reference read."""

    GROUP_NAME: str = "default"
    CHAT_MODEL: str = ""
    CHAT_PROXY: str = ""
    BASE_URL: str = ""
    API_KEY: str = field(default="", repr=False)
    MODEL_TYPE: str = "chat"
    ENABLE_VISION: bool = True
    ENABLE_COT: bool = False
    TEMPERATURE: float | None = None
    TOP_P: float | None = None
    TOP_K: int | None = None
    PRESENCE_PENALTY: float | None = None
    FREQUENCY_PENALTY: float | None = None
    EXTRA_BODY: str | None = None
    TOKEN_INPUT_RATE: float = 1.0
    TOKEN_COMPLETION_RATE: float = 1.0
    MODEL_PRICE_RATE: float = 1.0


def group_name(name: str) -> str:
    """Return a model group's name as names are compared: lower case, ``-`` for ``_``."""
    return name.strip().lower().replace("_", "-")


def group_variable(name: str, value: str) -> str:
    """Return the environment variable of one value of a model group."""
    if group_name(name) == "default":
        return f"NEKRO_LLM__{value}"
    return f"NEKRO_MODELS__{group_name(name).upper().replace('-', '_')}__{value}"


class ModelGroups(Mapping[str, ModelConfigGroup]):
    """Model groups by name; ``text_embedding`` and ``Text-Embedding`` are the same name.

    A name without a group raises ``KeyError``; the message names the variable that defines it.
    """

    def __init__(self, groups: Mapping[str, ModelConfigGroup]) -> None:
        self._groups = {group_name(name): group for name, group in groups.items()}

    def __getitem__(self, name: str) -> ModelConfigGroup:
        try:
            return self._groups[group_name(name)]
        except KeyError:
            known = ", ".join(self._groups) or "none"
            raise KeyError(
                f"there is no model group {name!r}; {_definition(name)} (there are: {known})"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)


def _definition(name: str) -> str:
    if group_name(name) == "default":
        return "define it with NEKRO_LLM__BASE_URL and NEKRO_LLM__MODEL"
    if not group_name(name).replace("-", "").isalnum() or not name.isascii():
        return f'define it in NEKRO_MODELS, as JSON: {{"{name}": {{"model": "…"}}}}'
    return f"define it with {group_variable(name, 'MODEL')}, and {group_variable(name, 'BASE_URL')} if needed"


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """Global values that plugins read as ``core.config``."""

    MODEL_GROUPS: Mapping[str, ModelConfigGroup] = field(default_factory=dict)
    USE_MODEL_GROUP: str = "default"
    DEFAULT_PROXY: str | None = None
    AI_CHAT_PRESET_NAME: str = "Agent"
    AI_CHAT_PRESET_SETTING: str = ""
    SUPER_USERS: tuple[str, ...] = ()

    #: Messages older than this are not in prompts, in seconds.
    AI_CHAT_CONTEXT_EXPIRE_SECONDS: int = 3650 * 86_400
    #: Messages in a prompt.
    AI_CHAT_CONTEXT_MAX_LENGTH: int = 32
    AI_DEBOUNCE_WAIT_SECONDS: float = 0.0
    AI_GENERATE_TIMEOUT: int = 180
    AI_SCRIPT_MAX_RETRY_TIMES: int = 8
    SANDBOX_RUNNING_TIMEOUT: int = 60
    #: "" means the embedded database.
    QDRANT_URL: str = ""
    QDRANT_API_KEY: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "MODEL_GROUPS", ModelGroups(self.MODEL_GROUPS))

    def get_model_group_info(self, model_name: str) -> ModelConfigGroup:
        """Return a model group.

        Raises:
            KeyError: there is none of that name; the message names the variable that defines it.
        """
        return self.MODEL_GROUPS[model_name]

    def __getattr__(self, name: str) -> object:
        raise AttributeError(
            f"core.config has no {name}: this system is configured by NEKRO_ variables; "
            f"it offers {', '.join(sorted(self.__dataclass_fields__))}"
        )


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Every port that plugin code uses, and the limits that apply to it.

    A port that is None is not available in this process.
    """

    data_dir: Path
    store: KeyValueStore
    messages: Messages
    areas: FileAreas
    timers: Timers | None = None
    cron_jobs: CronJobs | None = None
    jobs: Jobs | None = None
    records: Records | None = None
    #: Receives messages from people that plugins pass on.
    intake: Intake | None = None
    #: Counts and limits what plugins ask of models; None: nothing is counted.
    model_budget: ModelBudget | None = None
    #: None: downloads to one target exclude each other only within this process.
    download_claims: Downloads | None = None
    #: Runs the plugins' ``on_system_message`` hooks; None where no plugins are loaded.
    hooks: SystemMessageHooks | None = None
    store_policy: StorePolicy = field(default_factory=StorePolicy)
    downloads: DownloadPolicy = field(default_factory=DownloadPolicy)
    packages: PackagePolicy = field(default_factory=PackagePolicy)
    uploads: UploadPolicy = field(default_factory=UploadPolicy)
    #: What plugins read as ``core.config``.
    core: CoreConfig = field(default_factory=CoreConfig)

    @overload
    def service(self, name: Literal["timers"]) -> Timers: ...
    @overload
    def service(self, name: Literal["cron_jobs"]) -> CronJobs: ...
    @overload
    def service(self, name: Literal["jobs"]) -> Jobs: ...
    @overload
    def service(self, name: Literal["records"]) -> Records: ...
    @overload
    def service(self, name: Literal["intake"]) -> Intake: ...
    def service(self, name: str) -> Any:
        """Return a port that is not available in every process.

        Raises:
            RuntimeNotBoundError: it is not available in this process.
        """
        port = getattr(self, name)
        if port is None:
            raise RuntimeNotBoundError(f"this process offers no {name}: the runtime was bound without them")
        return port


_current: Runtime | None = None

_data_root: Path | None = None

_packages = PackagePolicy()

_core = CoreConfig()


def bind(runtime: Runtime) -> None:
    """Make ``runtime`` the runtime of this process's plugin code."""
    global _current
    _current = runtime


def unbind() -> None:
    """Remove the bound runtime; used when a process stops and in tests."""
    global _current
    _current = None


@contextmanager
def bound(runtime: Runtime) -> Iterator[Runtime]:
    """Bind ``runtime`` for a block, then restore the previous one."""
    global _current
    before, _current = _current, runtime
    try:
        yield runtime
    finally:
        _current = before


def is_bound() -> bool:
    """Whether a runtime is bound."""
    return _current is not None


def current() -> Runtime:
    """Return the bound runtime.

    Raises:
        RuntimeNotBoundError: nothing is bound, for example because a plugin uses
            ``plugin.store`` at import time.
    """
    if _current is None:
        raise RuntimeNotBoundError(
            "no runtime is bound: plugin services work inside methods and hooks, not at import time "
            "(in a test, use nekro_agent.testing.InMemoryRuntime)"
        )
    return _current


def prepare(
    *, data_dir: Path | None, packages: PackagePolicy | None = None, core: CoreConfig | None = None
) -> None:
    """Set what plugins may need during their import, before a runtime is bound.

    Args:
        data_dir: None restores the environment's.
        packages: None allows installing.
        core: None has defaults only.
    """
    global _data_root, _packages, _core
    _data_root = None if data_dir is None else data_dir.expanduser().absolute()
    _packages = packages or PackagePolicy()
    _core = core or CoreConfig()


def core_config() -> CoreConfig:
    """Return the values of ``core.config``; works before a runtime is bound."""
    return _core if _current is None else _current.core


def package_policy() -> PackagePolicy:
    """Return what plugins may install; works before a runtime is bound."""
    return _packages if _current is None else _current.packages


def data_root() -> Path:
    """Return the absolute data root; works before a runtime is bound.

    Until then it is what :func:`prepare` was given, else ``NEKRO_DATA_DIR``, else ``./data``.
    """
    if _current is not None:
        return _current.data_dir
    if _data_root is not None:
        return _data_root
    return Path(os.environ.get("NEKRO_DATA_DIR") or "data").expanduser().absolute()
