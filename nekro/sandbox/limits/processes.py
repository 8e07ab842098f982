"""List the processes of a sandbox, their threads and their memory, as seen by the host.

A process that cannot be read is never ignored: one that has ended holds nothing, any other raises.
The first thread of a process may end before the others, and threads need not share their
descriptors, so a process is read thread by thread.

Source: proc(5), clone(2), ptrace(2) ("access mode checking"), prctl(2) ``PR_SET_DUMPABLE``.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from nekro.sandbox.driver import Usage
from nekro.sandbox.limits import proc_files

__all__ = [
    "UnsettledError",
    "is_gone",
    "processes_beside",
    "shared_out",
    "tasks_of",
    "threads_of_user",
    "usage_of",
]

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class UnsettledError(Exception):
    """The measured processes or files changed faster than they could be read; the result is incomplete."""


def is_gone(task: str) -> bool:
    """Whether a process or thread, given by its directory in ``/proc``, has released its memory.

    It is then a zombie or just ending, and the kernel refuses most reads of it.
    """
    try:
        return proc_files.resident_pages(proc_files.read(f"{task}/statm")) == 0
    except (FileNotFoundError, ProcessLookupError):
        return True


def tasks_of(pid: int) -> list[str]:
    """Return the directories of a process's threads in ``/proc``; empty when it has ended."""
    directory = f"/proc/{pid}/task"
    try:
        return [f"{directory}/{name}" for name in os.listdir(directory)]
    except (FileNotFoundError, ProcessLookupError):
        return []


def threads_of_user(uid: int) -> int:
    """Return how many threads run as a user, which is what ``RLIMIT_NPROC`` counts."""
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                status = proc_files.read(f"/proc/{name}/status")
                if int(proc_files.field_of(status, b"Uid").split()[0]) == uid:
                    found += proc_files.number(proc_files.field_of(status, b"Threads"))
    return found


def processes_beside(first_pid: int) -> list[int]:
    """Return the host ids of all processes in a process's pid namespace; empty when that one has ended.

    A process whose namespace cannot be read is included when its parent is.
    """
    try:
        namespace = os.stat(f"/proc/{first_pid}/ns/pid").st_ino
    except (FileNotFoundError, ProcessLookupError):
        return []
    found, closed = [], []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                found.append(int(name))
        except PermissionError:
            closed.append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [*found, *_children_among(closed, set(found))]


def _children_among(pids: list[int], parents: set[int]) -> list[int]:
    """Return those of ``pids`` that descend from ``parents``; ids increase, so parents mostly come first."""
    found: list[int] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if proc_files.process_stat(proc_files.read(f"/proc/{pid}/stat")).parent in parents:
                parents.add(pid)
                found.append(pid)
    return found


def shared_out(pids: list[int]) -> int:
    """Return the memory of processes in bytes, with shared pages counted proportionally."""
    return sum(_proportional_bytes(pid) for pid in pids)


def usage_of(pids: list[int]) -> Usage:
    """Return the sum of the resident memory of processes, and their number."""
    return Usage(memory_bytes=sum(_resident_bytes(pid) for pid in pids), processes=len(pids))


def _proportional_bytes(pid: int) -> int:
    for task in (f"/proc/{pid}", *tasks_of(pid)):
        try:
            return proc_files.kibibytes(proc_files.read(f"{task}/smaps_rollup"), b"Pss")
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            # The process has made itself unreadable: shared pages count fully.
            return _resident_bytes(pid)
    return 0


def _resident_bytes(pid: int) -> int:
    # All threads share the memory; the first one may have ended before the others.
    for task in (f"/proc/{pid}", *tasks_of(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if pages := proc_files.resident_pages(proc_files.read(f"{task}/statm")):
                return pages * _PAGE_BYTES
    return 0
