"""Plugins that a test loads, and drops for the next one."""

from __future__ import annotations

from workers.plugins.loader import LoadedPlugins, forget


def unload_plugins(loaded: LoadedPlugins) -> None:
    """Drop the plugins' modules, so that loading them again executes their files again."""
    for each in loaded.found:
        forget(each)
