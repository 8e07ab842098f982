"""Lowers the CPU priority of lane ``long`` in favour of other processes on the machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from nekro_agent.durations import RETRY_SECONDS

__all__ = ["SessionShare", "lower_thread"]


def lower_thread(niceness: int) -> None:
    """Lower the priority of this thread and of the threads that it starts later.

    The process keeps its priority: its other threads renew claims, and inits run in turns.
    """
    if niceness and sys.platform == "linux":  # elsewhere this call would lower the whole process
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)


class SessionShare:
    """Lowers this process's CPU share relative to other sessions while jobs run.

    With ``sched_autogroup_enabled`` Linux shares the CPU between sessions first and applies thread
    niceness only within each session. A worker is a session of its own, so lowering a thread alone would
    favour no other process. Within the session, threads that renew claims have priority over the jobs. While
    no job runs, the share is not lowered, so inits run at full share. Use it on the thread of ``loop`` only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        niceness: int,
        is_busy: Callable[[], bool],
        path: Path = Path("/proc/self/autogroup"),
        settle_seconds: float = RETRY_SECONDS,
    ) -> None:
        """Create it with the full share.

        Args:
            path: the kernel's file for the niceness of the session.
            settle_seconds: delay between a change and its effect.
        """
        self._loop = loop
        self._niceness = niceness
        self._is_busy = is_busy
        self._path = path
        self._settle_seconds = settle_seconds
        self._now = 0
        self._timer: asyncio.TimerHandle | None = None
        # In a session shared with other processes, their share would be lowered too.
        self._is_possible = niceness > 0 and sys.platform == "linux" and os.getsid(0) == os.getpid()

    def changed(self) -> None:
        """Record that a job started or ended; the share is adjusted soon."""
        if self._is_possible and self._timer is None:
            self._timer = self._loop.call_later(self._settle_seconds, self._settle)

    def _settle(self) -> None:
        self._timer = None
        wanted = self._niceness if self._is_busy() else 0
        if wanted == self._now:
            return
        try:
            _write(self._path, str(wanted))
            self._now = wanted
        except BlockingIOError:  # the kernel accepts ten writes a second from all processes together
            self.changed()
        except OSError:  # the kernel has no autogroups, or they are not writable here
            self._is_possible = False


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
