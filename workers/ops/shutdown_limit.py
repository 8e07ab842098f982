"""Bounds the duration of a worker's shutdown, whatever still runs in the process.

Each step of a shutdown has a limit, and most steps share one (``nekro.base.greenlet_bridge.close_all``). A
blocked thread has no limit: Python waits for the threads of executors when it exits.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Final, NamedTuple

from celery import signals
from loguru import logger

from nekro.broker.celery.worker import allow_repeated_stop_signals
from nekro_agent.durations import CLOSE_STEP_SECONDS

__all__ = ["ShutdownLimit"]

#: Exit code of a worker whose shutdown exceeded its limit.
_CUT_EXIT: Final = 1


class _Order(NamedTuple):
    seconds: float
    code: int


class ShutdownLimit:
    """Ends the process a limited time after it was asked to stop; create one per worker process."""

    def __init__(self, *, warm_seconds: float, cold_seconds: float) -> None:
        """Start the thread, which does nothing until Celery stops the worker.

        Args:
            warm_seconds: limit of a shutdown that waits for running calls.
            cold_seconds: limit of a shutdown that stops them, as after a second signal.
        """
        self._seconds = {"Warm": warm_seconds, "Cold": cold_seconds, "Soft": warm_seconds}
        # A signal handler may use only this kind of queue: its `put` takes no Python lock.
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="nekro-shutdown-limit", daemon=True).start()
        allow_repeated_stop_signals()
        signals.worker_shutting_down.connect(self._stopping, weak=False)

    def closed(self, *, code: int) -> None:
        """Exit with this code soon: everything was closed, although a thread may still run."""
        self._orders.put(_Order(CLOSE_STEP_SECONDS, code=code))

    def _stopping(self, *, how: str, **_: object) -> None:
        self._orders.put(_Order(self._seconds.get(how, min(self._seconds.values())), code=_CUT_EXIT))

    def _watch(self) -> None:
        end, code = float("inf"), _CUT_EXIT
        while True:
            left = None if end == float("inf") else max(0.0, end - time.monotonic())
            try:
                order = self._orders.get(timeout=left)
            except queue.Empty:
                _end_process(code)
                return
            # A later order never extends the time.
            end, code = min(end, time.monotonic() + order.seconds), order.code


def _end_process(code: int) -> None:
    logger.bind(threads=_threads()).warning("shutdown_cut_short")
    sys.stderr.flush()
    os._exit(code)


def _threads() -> list[str]:
    """Describe each thread of the process but this one: its name and its innermost frame."""
    frames = sys._current_frames()
    return [
        f"{thread.name}: {_innermost(frames.get(thread.ident or 0))}"
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
    ]


def _innermost(frame: FrameType | None) -> str:
    if frame is None:
        return "ended"
    last = traceback.extract_stack(frame)[-1]
    return f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}"
