"""Which queue a method's calls travel on."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from broker_config.topology import lane_queue
from nekro_agent.methods import Lane
from workers.registry import MethodEntry

__all__ = ["LaneChooser"]


class LaneChooser:
    """Decides by, in this order: pinned plugin, mark (operator or watchdog), the method's own lane."""

    def __init__(
        self, *, pinned_plugins: Collection[str] = (), marks: Mapping[str, str] | None = None
    ) -> None:
        self._declared = frozenset(pinned_plugins)
        self.update_marks(marks or {})

    def is_pinned(self, plugin_key: str) -> bool:
        """Whether a plugin lives in one process: by itself, by settings, or by a mark on its key."""
        return plugin_key in self._pinned

    def lane_of(self, entry: MethodEntry) -> str:
        """Name of the lane, which is the name of its queue."""
        if self.is_pinned(entry.plugin.key):
            return str(lane_queue(Lane.METHODS, entry.plugin.key).name)
        return self._marks.get(entry.task) or entry.lane.value

    def lane_of_plugin(self, plugin_key: str) -> str:
        """Name of the lane of what a plugin does besides its methods."""
        if self.is_pinned(plugin_key):
            return str(lane_queue(Lane.METHODS, plugin_key).name)
        return Lane.METHODS.value

    def update_marks(self, marks: Mapping[str, str]) -> None:
        """Take over the marks that the database holds: task name, or key of a pinned plugin, to lane."""
        self._marks = dict(marks)
        self._pinned = self._declared.union(key for key, lane in marks.items() if lane == Lane.PINNED.value)
