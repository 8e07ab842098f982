"""Processes of sandboxes whose service was killed while it started them.

From its first instruction to that of the code, bubblewrap carries a mark in its environment, which
the code does not inherit: it names the service, and the launch. A service that is killed in between
can leave processes that wait for ever; the next one on this host ends them. With control groups
they are members of a group as well, and end with it; this is for hosts without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Final

from sandbox.service_id import ServiceId, own_id

__all__ = ["end_launch", "end_orphans", "launch_mark"]

_VARIABLE: Final = "NEKRO_SANDBOX_LAUNCH"
_numbers: Final = itertools.count()
#: A process that is just being started may slip through one look.
_LOOKS: Final = 3


def launch_mark() -> dict[str, str]:
    """Return the environment of one launch."""
    return {_VARIABLE: f"{own_id()} {next(_numbers)}"}


def end_launch(mark: dict[str, str]) -> int:
    """Kill what is left of one launch whose first process has ended; returns how many processes."""
    return _end(lambda found: found == mark[_VARIABLE])


def end_orphans() -> int:
    """Kill what services that are gone left while it started; returns how many processes.

    Services are told apart by process id and start time, so a reused id protects no orphan and
    endangers no sandbox of a service that lives.
    """

    def is_orphan(mark: str) -> bool:
        owner = ServiceId.parse(mark.partition(" ")[0])
        return owner is not None and owner.is_gone(still_runs=True)

    return _end(is_orphan)


def _end(chosen: Callable[[str], bool]) -> int:
    ended = 0
    for _ in range(_LOOKS):
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
    except OSError:  # it has ended, or is another user's
        return None
    prefix = f"{_VARIABLE}=".encode()
    for word in words:
        if word.startswith(prefix):
            return word.removeprefix(prefix).decode("ascii", "replace")
    return None
