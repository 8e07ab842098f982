"""The services behind the SDK, bundled; one bundle is bound per process.

Plugins never see this module. The application binds a :class:`Runtime` when it starts
(``workers.runtime`` on SQL and Celery, ``nekro_agent.testing`` in memory). What plugins
do at import time, before anything is bound, needs the data root only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nekro_agent.errors import RuntimeNotBoundError
from nekro_agent.policies import DownloadPolicy, PackagePolicy, StorePolicy
from nekro_agent.ports import FileAreas, KeyValueStore, Messages, SystemMessageHooks

__all__ = ["Runtime", "bind", "bound", "current", "data_root", "is_bound", "set_data_root", "unbind"]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Every port that plugin code reaches, and the limits that apply to it.

    A port that is None is a service that this process does not offer; using it raises
    ``RuntimeNotBoundError`` with the port's name.
    """

    data_dir: Path
    store: KeyValueStore
    messages: Messages
    areas: FileAreas
    #: Runs the plugins' ``on_system_message`` hooks; None where no plugins are loaded.
    hooks: SystemMessageHooks | None = None
    store_policy: StorePolicy = field(default_factory=StorePolicy)
    downloads: DownloadPolicy = field(default_factory=DownloadPolicy)
    packages: PackagePolicy = field(default_factory=PackagePolicy)


_current: Runtime | None = None
_data_root: Path | None = None


def bind(runtime: Runtime) -> None:
    """Make ``runtime`` the one that plugin code of this process uses."""
    global _current
    _current = runtime


def unbind() -> None:
    """Take the bound runtime away; used when a process stops and in tests."""
    global _current
    _current = None


@contextmanager
def bound(runtime: Runtime) -> Iterator[Runtime]:
    """Bind ``runtime`` for a block and restore what was bound before."""
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


def set_data_root(path: Path | None) -> None:
    """Fix the data root for code that runs before a runtime is bound; None returns to the environment's."""
    global _data_root
    _data_root = None if path is None else path.expanduser().absolute()


def data_root() -> Path:
    """Return the absolute data root; works before a runtime is bound.

    Until then it is what :func:`set_data_root` was given, else ``NEKRO_DATA_DIR``, else ``./data``.
    """
    if _current is not None:
        return _current.data_dir
    if _data_root is not None:
        return _data_root
    return Path(os.environ.get("NEKRO_DATA_DIR") or "data").expanduser().absolute()
