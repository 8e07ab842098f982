"""Find and kill processes of sandboxes whose service was killed while it started them.

Until the code starts, bubblewrap has a variable in its environment that identifies the service and the
launch; the code does not inherit it. A service that is killed during a launch can leave processes that
wait forever; the next service on this host kills them. With control groups they are members of a group,
and end with it; this module is for hosts without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

from nekro.sandbox.service_id import ServiceId, own_id

__all__ = ["end_launch", "end_orphans", "launch_mark"]

_VARIABLE: Final = "NEKRO_SANDBOX_LAUNCH"
_numbers: Final = itertools.count()
#: Passes over /proc: a process that is just being started may be missed by one.
_PASSES: Final = 3


def launch_mark() -> dict[str, str]:
    """Return the environment of one launch."""
    return {_VARIABLE: f"{own_id()} {next(_numbers)}"}


def end_launch(mark: dict[str, str]) -> int:
    """Kill the remaining processes of one launch whose first process has ended; returns how many."""
    return _end(lambda found: found == mark[_VARIABLE])


def end_orphans() -> int:
    """Kill processes of unfinished launches of services that have ended; returns how many.

    Services are identified by process id and start time, so that with a reused id neither an orphan is
    kept nor a sandbox of a running service killed.
    """

    def is_orphan(mark: str) -> bool:
        owner = ServiceId.parse(mark.partition(" ")[0])
        return owner is not None and owner.is_gone(still_runs=True)

    return _end(is_orphan)


def _end(chosen: Callable[[str], bool]) -> int:
    ended = 0
    for _ in range(_PASSES):
        before = ended
        for descriptor, mark in _marked():
            if chosen(mark):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    ended += 1
        if ended == before:
            break
    return ended


def _marked() -> Iterator[tuple[int, str]]:
    """Yield (descriptor, mark) of marked processes; a descriptor is valid until the next step."""
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            # Opened before the environment is read: a reused id cannot be hit.
            descriptor = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            mark = _mark_of(name)
            if mark is not None:
                yield descriptor, mark
        finally:
            os.close(descriptor)


def _mark_of(pid: str) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return None
    prefix = f"{_VARIABLE}=".encode()
    for word in words:
        if word.startswith(prefix):
            return word.removeprefix(prefix).decode("ascii", "replace")
    return None
