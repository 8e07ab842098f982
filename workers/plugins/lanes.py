"""Chooses the queue of a method's calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from broker_config.topology import lane_queue
from nekro_agent.methods import Lane
from workers.plugins.registry import MethodEntry

__all__ = ["LaneChooser"]


class LaneChooser:
    """Chooses by, in this order: pinned plugin, lane override (mark), the method's own lane."""

    def __init__(
        self, *, pinned_plugins: Collection[str] = (), marks: Mapping[str, str] | None = None
    ) -> None:
        self._declared = frozenset(pinned_plugins)
        self.update_marks(marks or {})

    def is_pinned(self, plugin_key: str) -> bool:
        """Whether a plugin runs in one process: by its own declaration, by settings or by a mark."""
        return plugin_key in self._pinned

    def lane_of(self, entry: MethodEntry) -> str:
        """Name of the lane, which is also the name of its queue."""
        if self.is_pinned(entry.plugin.key):
            return str(lane_queue(Lane.METHODS, entry.plugin.key).name)
        return self._marks.get(entry.task) or entry.lane.value

    def lane_of_plugin(self, plugin_key: str) -> str:
        """Name of the lane for a plugin's work other than methods."""
        if self.is_pinned(plugin_key):
            return str(lane_queue(Lane.METHODS, plugin_key).name)
        return Lane.METHODS.value

    def update_marks(self, marks: Mapping[str, str]) -> None:
        """Replace the marks with those of the database: task name, or key of a pinned plugin, to lane."""
        self._marks = dict(marks)
        self._pinned = self._declared.union(key for key, lane in marks.items() if lane == Lane.PINNED.value)
