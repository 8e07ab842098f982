"""Knows which plugin's code runs, so that an old version is cleaned up only after its last run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final
from weakref import WeakKeyDictionary

from nekro_agent.plugin import NekroPlugin

__all__ = ["is_in_use", "plugin_in_use", "using"]

_lock: Final = threading.Lock()
_plugin: Final[ContextVar[NekroPlugin | None]] = ContextVar("nekro_plugin_in_use", default=None)
_runs: Final[WeakKeyDictionary[NekroPlugin, int]] = WeakKeyDictionary()


@contextmanager
def using(plugin: NekroPlugin) -> Iterator[None]:
    """Count the block as a run of the plugin's code; on any thread."""
    with _lock:
        _runs[plugin] = _runs.get(plugin, 0) + 1
    token = _plugin.set(plugin)
    try:
        yield
    finally:
        _plugin.reset(token)
        with _lock:
            _runs[plugin] -= 1


def plugin_in_use() -> NekroPlugin | None:
    """Return the plugin whose code runs, also in tasks and threads that it has started; None for others."""
    return _plugin.get()


def is_in_use(plugin: NekroPlugin) -> bool:
    """Whether code of the plugin runs: a method, a command, a hook or a job."""
    with _lock:
        return _runs.get(plugin, 0) > 0
