"""Chooses the queue of a method's calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from broker_config.keys import pinned_queue
from nekro.plugins.entries import RoutedEntry
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["LaneChooser", "declare_pinned"]


class LaneChooser:
    """Chooses by, in this order: pinned plugin, lane override, the method's own lane."""

    def __init__(
        self, *, pinned_plugins: Collection[str] = (), overrides: Mapping[str, str] | None = None
    ) -> None:
        self._declared = frozenset(pinned_plugins)
        self.update_overrides(overrides or {})

    def is_pinned(self, plugin_key: str) -> bool:
        """Whether a plugin runs in one process: by its own declaration, by settings or by an override."""
        return plugin_key in self._pinned

    def lane_of(self, entry: RoutedEntry) -> str:
        """Name of the lane, which is also the name of its queue."""
        if self.is_pinned(entry.plugin_key):
            return pinned_queue(entry.plugin_key)
        return self._overrides.get(entry.task) or entry.lane.value

    def lane_of_plugin(self, plugin_key: str) -> str:
        """Name of the lane for a plugin's work other than methods."""
        if self.is_pinned(plugin_key):
            return pinned_queue(plugin_key)
        return Lane.METHODS.value

    def declare(self, plugin_keys: Collection[str]) -> None:
        """Replace the plugins that are pinned by their own declaration or by settings."""
        self._declared = frozenset(plugin_keys)
        self.update_overrides(self._overrides)

    def update_overrides(self, overrides: Mapping[str, str]) -> None:
        """Replace the overrides with those of the database: task name, or key of a pinned plugin, to lane."""
        self._overrides = dict(overrides)
        pinned = (key for key, lane in overrides.items() if lane == Lane.PINNED.value)
        self._pinned = self._declared.union(pinned)


def declare_pinned(app: Celery, plugin_keys: Iterable[str]) -> None:
    """Let this process send to the queues of pinned plugins."""
    from broker_config.topology import sending_queue

    for key in plugin_keys:
        sending_queue(app, pinned_queue(key))
