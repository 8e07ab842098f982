"""Counts the runs of a plugin's code, so that an old version is cleaned up only after its last one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

from nekro_agent.plugin import NekroPlugin

__all__ = ["is_in_use", "using"]

_lock: Final = threading.Lock()
_runs: Final[WeakKeyDictionary[NekroPlugin, int]] = WeakKeyDictionary()


@contextmanager
def using(plugin: NekroPlugin) -> Iterator[None]:
    """Count the block as a run of the plugin's code; on any thread."""
    with _lock:
        _runs[plugin] = _runs.get(plugin, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _runs[plugin] -= 1


def is_in_use(plugin: NekroPlugin) -> bool:
    """Whether code of the plugin runs: a method, a command, a hook or a job."""
    with _lock:
        return _runs.get(plugin, 0) > 0
