"""The services behind the SDK, as one bundle that is bound per process.

Plugins do not use this module. The application binds a :class:`Runtime` when it starts
(``workers.services``; in tests of plugins, ``nekro_agent.testing``). During the import
of plugins, before a runtime is bound, only the data root and the package policy are available.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from nekro_agent.errors import RuntimeNotBoundError
from nekro_agent.policies import CoreConfig, DownloadPolicy, PackagePolicy, StorePolicy, UploadPolicy
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

__all__ = [
    "Runtime",
    "bind",
    "bound",
    "current",
    "data_root",
    "is_bound",
    "package_policy",
    "prepare",
    "unbind",
]


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
