"""Plugins that a test loads, and drops for the next one; and imports that take longer than they may."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from waiting import WAIT_SECONDS

from nekro.plugins import import_trials, loader
from nekro.plugins.loader import LoadedPlugins, forget


def unload_plugins(loaded: LoadedPlugins) -> None:
    """Drop the plugins' modules, so that loading them again executes their files again."""
    for each in loaded.found:
        forget(each)


def end_patience_with(monkeypatch: pytest.MonkeyPatch, *names: str) -> Callable[[str], None]:
    """Return an ``on_progress`` after which the import of these plugins has taken longer than `WAIT_SECONDS`.

    Every other import has that time, however busy the machine is.
    """
    ahead_seconds = 0.0

    def on_progress(text: str) -> None:
        nonlocal ahead_seconds
        if text.split()[1] in names:
            ahead_seconds += 2 * WAIT_SECONDS

    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead_seconds, process_time=time.process_time
    )
    for module in (import_trials, loader):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.05)
    return on_progress
