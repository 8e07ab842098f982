"""How lane ``long`` gives way to the rest of its machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["SessionShare", "lower_thread"]

#: Calls that last less change nothing; also the pause before a write that came too soon is tried again.
_SETTLE_SECONDS: Final = 0.5


def lower_thread(niceness: int) -> None:
    """Lower the priority of this thread and of those that it starts.

    Not of the process: its other threads renew claims, and inits wait for each other in the fleet.
    """
    if niceness and sys.platform == "linux":  # elsewhere it would be the process
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + niceness)


class SessionShare:
    """Lowers this process's share of the CPU beside other sessions while jobs run.

    Linux shares the CPU between sessions first, where it groups them (``sched_autogroup_enabled``), and
    looks at the niceness of threads only within each. Workers are sessions of their own, so a lowered
    thread alone would give way to nobody. Threads that renew claims come first within the session, and inits
    find its share as it was unless a job runs. Use it on the thread of ``loop`` only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        niceness: int,
        is_busy: Callable[[], bool],
        path: Path = Path("/proc/self/autogroup"),
        settle_seconds: float = _SETTLE_SECONDS,
    ) -> None:
        """Take what decides.

        Args:
            path: where the kernel takes the niceness of the session.
            settle_seconds: how long after a change it counts.
        """
        self._loop = loop
        self._niceness = niceness
        self._is_busy = is_busy
        self._path = path
        self._settle_seconds = settle_seconds
        self._now = 0
        self._timer: asyncio.TimerHandle | None = None
        # Of a session that others share, their share would sink too.
        self._is_possible = niceness > 0 and sys.platform == "linux" and os.getsid(0) == os.getpid()

    def changed(self) -> None:
        """A job began or ended: settle it soon."""
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
        except BlockingIOError:  # the kernel takes ten writes a second, of all processes together
            self.changed()
        except OSError:  # it does not group sessions, or not here
            self._is_possible = False


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
