"""Detects methods that block their event loop: a separate thread watches what runs there and how long.

The loop's own thread cannot detect it: while ``requests.get`` or ``time.sleep`` blocks it, nothing else runs.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from loguru import logger

from nekro.app.background import BackgroundLoop
from nekro.base.metrics import metrics
from nekro.plugins.entries import RoutedEntry
from nekro.plugins.lanes import LaneChooser
from nekro_agent.durations import CLOSE_STEP_SECONDS
from nekro_agent.errors import StorageError
from nekro_agent.methods import Lane
from storage.engine import Database

__all__ = ["BlockingMethod", "LaneMover", "LoopWatchdog"]

T = TypeVar("T")

#: Blocking time that is reported: far above a garbage collection, below what users of the loop tolerate.
_WARN_SECONDS: Final = 0.5
_LOOKS_PER_WARNING: Final = 4
_FRAMES: Final = 12
#: A method that blocks again is reported again after this time, so that it cannot flood the log.
_REPEAT_SECONDS: Final = 30.0
_GIVE_UP_EXIT: Final = 70


@dataclass(frozen=True, kw_only=True)
class BlockingMethod:
    """A method that was observed to block."""

    entry: RoutedEntry
    #: Duration so far; it may continue.
    seconds: float
    #: Innermost frame: ``file:line in function``.
    where: str
    #: The stack in the format of a traceback.
    stack: str


class LaneMover:
    """Moves methods that block to lane ``long``."""

    def __init__(
        self, database: Database, background: Callable[[], BackgroundLoop], lanes: LaneChooser
    ) -> None:
        """Create it.

        Args:
            background: returns the loop for writes; called at the first one.
        """
        self._database, self._background, self._lanes = database, background, lanes

    def record(self, blocking: BlockingMethod) -> None:
        """Route a blocking method's calls to lane ``long`` from now on; thread-safe."""
        entry = blocking.entry
        log = logger.bind(plugin=entry.plugin_key, method=entry.task, seconds=round(blocking.seconds, 3))
        log.warning(f"method_blocks_event_loop\n{blocking.stack}")
        if self._lanes.lane_of(entry) == Lane.METHODS.value:
            reason = f"blocked an event loop for {blocking.seconds:.1f} s at {blocking.where}"
            self._background().submit(self._move(entry.task, reason))

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


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A coroutine's execution between two suspensions."""

    entry: RoutedEntry
    began_at: float
    #: On the same clock: when the process ends.
    give_up_at: float


class LoopWatchdog:
    """Watches the calls of one event loop; call ``start`` and ``follow`` on that loop."""

    def __init__(
        self,
        *,
        on_block: Callable[[BlockingMethod], None],
        give_up_seconds: float | None,
        warn_seconds: float = _WARN_SECONDS,
    ) -> None:
        """Create the watchdog.

        Args:
            on_block: called on the watchdog's thread.
            give_up_seconds: how long beyond its call's deadline a method may block the loop; then the
                process exits, because the method cannot be stopped and nothing else runs. None: no limit.
            warn_seconds: blocking time that is reported.
        """
        self._warn_seconds = warn_seconds
        self._on_block = on_block
        self._give_up_seconds = give_up_seconds
        self._step: _Step | None = None
        self._loop_thread = 0
        self._reported: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start watching the loop of the calling thread."""
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="nekro-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(CLOSE_STEP_SECONDS)

    @types.coroutine
    def follow(
        self,
        entry: RoutedEntry,
        work: Coroutine[Any, Any, T],
        *,
        remaining_seconds: float,
        on_step: Callable[[float], None] | None = None,
    ) -> Generator[Any, Any, T]:
        """Await a method's coroutine so that the watchdog can observe each of its steps.

        Args:
            remaining_seconds: until the call's deadline.
            on_step: called after each step with the seconds that it occupied the loop.
        """
        patience = float("inf") if self._give_up_seconds is None else self._give_up_seconds
        give_up_at = time.monotonic() + max(remaining_seconds, 0) + patience
        error: BaseException | None = None
        while True:
            began_at = time.monotonic()
            self._step = _Step(entry=entry, began_at=began_at, give_up_at=give_up_at)
            try:
                awaited = work.send(None) if error is None else work.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self._step = None
                if on_step is not None:
                    on_step(time.monotonic() - began_at)
            try:
                yield awaited
                error = None
            except GeneratorExit:
                work.close()
                raise
            except BaseException as exc:
                error = exc

    def _watch(self) -> None:
        pause = self._warn_seconds / _LOOKS_PER_WARNING
        looked_at = awake_since = time.monotonic()
        while not self._stopped.wait(pause):
            now, step = time.monotonic(), self._step
            if now - looked_at > 3 * pause:
                # This thread was late too: the process was suspended or starved, not blocked by the method.
                awake_since = now
            looked_at = now
            if step is None:
                continue
            seconds = now - max(step.began_at, awake_since)
            if seconds >= self._warn_seconds:
                self._report(step, seconds)
            if now >= step.give_up_at and self._give_up_seconds and seconds >= self._give_up_seconds:
                self._give_up(step)

    def _report(self, step: _Step, seconds: float) -> None:
        last = self._reported.get(step.entry.task)
        if last is not None and time.monotonic() - last < _REPEAT_SECONDS:
            return
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None or self._step is not step:
            return
        self._reported[step.entry.task] = time.monotonic()
        metrics().loop_blocked.labels(step.entry.task).inc()
        frames = traceback.extract_stack(frame)[-_FRAMES:]
        innermost = frames[-1]
        blocking = BlockingMethod(
            entry=step.entry,
            seconds=seconds,
            where=f"{os.path.basename(innermost.filename)}:{innermost.lineno} in {innermost.name}",
            stack="".join(traceback.format_list(frames)),
        )
        try:
            self._on_block(blocking)
        except Exception:  # the watchdog must continue whatever the callback does
            logger.exception("blocking_method_not_recorded")

    def _give_up(self, step: _Step) -> None:
        logger.bind(
            plugin=step.entry.plugin_key, method=step.entry.task, seconds=time.monotonic() - step.began_at
        ).critical("event_loop_lost")
        # The loop cannot run anything else. The process's other deliveries are delivered again
        # elsewhere; this call is not, because its deadline has passed.
        os._exit(_GIVE_UP_EXIT)
