"""Lane overrides of methods, written by the watchdog or an operator and read by callers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from loguru import logger

from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.methods import Lane
from storage.caller_reads import lane_overrides

if TYPE_CHECKING:
    from nekro.app.background import BackgroundLoop
    from nekro.app.lane_blocking import Blocking
    from nekro.plugins.lanes import LaneChooser
    from storage.engine import Database

__all__ = ["LaneOverrides"]


class LaneOverrides:
    """The overrides of the database, and this process's copy of them."""

    def __init__(
        self,
        database: Database,
        background: Callable[[], BackgroundLoop],
        lanes: LaneChooser,
        *,
        on_pinned: Callable[[Iterable[str]], None],
    ) -> None:
        """Create the copy, without overrides.

        Args:
            background: returns the loop for writes; called at the first one, which most callers never do.
            on_pinned: called with the keys of plugins that overrides pin, before calls are routed so.
        """
        self._on_pinned = on_pinned
        self._database = database
        self._background = background
        self._lanes = lanes
        self._read_at: float | None = None

    async def refresh(self) -> None:
        """Read the overrides of the database; routes stay unchanged while the database is unavailable."""
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at < FRESH_SECONDS:
            return
        self._read_at = now
        try:
            async with self._database.read() as transaction:
                overrides = await lane_overrides(transaction.connection)
        except StorageError as exc:
            logger.bind(error=str(exc)).warning("lane_overrides_not_read")
            return
        lanes = {name: override.lane for name, override in overrides.items()}
        self._on_pinned(name for name, lane in lanes.items() if lane == Lane.PINNED.value)
        self._lanes.update_overrides(lanes)

    def record(self, blocking: Blocking) -> None:
        """Route a blocking method's calls to lane ``long`` from now on; thread-safe."""
        entry = blocking.entry
        log = logger.bind(plugin=entry.plugin_key, method=entry.task, seconds=round(blocking.seconds, 3))
        log.warning(f"method_blocks_event_loop\n{blocking.stack}")
        if self._lanes.lane_of(entry) == Lane.METHODS.value:
            reason = f"blocked an event loop for {blocking.seconds:.1f} s at {blocking.where}"
            self._background().submit(self._move(entry.task, reason))

    async def pin_plugin(self, plugin_key: str, *, reason: str) -> bool:
        """Pin a plugin to one process from now on; False when an operator decided otherwise."""
        async with self._database.autocommit() as transaction:
            is_pinned = await transaction.lane_overrides.set_by_watchdog(
                plugin_key, lane=Lane.PINNED, reason=reason
            )
        self._read_at = None
        await self.refresh()
        return is_pinned

    async def _move(self, method: str, reason: str) -> None:
        try:
            async with self._database.autocommit() as transaction:
                is_moved = await transaction.lane_overrides.set_by_watchdog(
                    method, lane=Lane.LONG, reason=reason
                )
        except StorageError as exc:  # the method will be reported again when it blocks again
            logger.bind(method=method, error=str(exc)).warning("lane_override_not_written")
            return
        if is_moved:
            logger.bind(method=method, lane=Lane.LONG.value).warning("method_moved_to_another_lane")
