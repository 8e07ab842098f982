"""Measure what the processes of a sandbox hold, as seen by the host: threads, memory, files, buffers.

A process that cannot be read is never ignored: one that has ended holds nothing, any other raises. The first
thread of a process may end before the others, and threads need not share their descriptors, so a process is
read thread by thread. Neither directory listings nor resident memory show everything. An unlinked file or
directory uses disk until its last descriptor and mapping are closed and no process executes it or has it as
its directory. A descriptor may be in flight in a socket, where no process has it open. The buffers of sockets
and pipes and the names in ``/tmp`` use kernel memory, which only a control group counts.

Source: proc(5), proc_pid_fdinfo(5), proc_pid_maps(5), clone(2), ptrace(2) ("access mode checking"), prctl(2)
``PR_SET_DUMPABLE``, unix(7), pipe(7), tmpfs(5).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from nekro.sandbox.driver import Usage
from nekro.sandbox.limits import proc_files

__all__ = [
    "Holdings",
    "UnsettledError",
    "hold_of_all",
    "is_gone",
    "names_bytes",
    "processes_beside",
    "settled_listing",
    "shared_out",
    "sockets_in_sockets",
    "tasks_of",
    "threads_of_user",
    "usage_of",
    "waiting_at",
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


def settled_listing(reaper: int, list_processes: Callable[[], list[int]]) -> list[int]:
    """Return ``list_processes()`` of a moment in which no process inside was orphaned.

    A process may end between its entry in ``/proc`` and the look at it, and what it held is then held by a
    child that it forked after the listing. That child is an orphan, which the kernel gives to the reaper.

    Args:
        reaper: process to which the kernel gives the orphans of the listed ones.

    Raises:
        UnsettledError: processes were orphaned during each of 20 listings.
        OSError: the kernel does not list children (``CONFIG_PROC_CHILDREN``).
    """
    before = _children_of(reaper)
    for _ in range(_MOST_LISTINGS):
        found = list_processes()
        after = _children_of(reaper)
        if after == before:
            return found
        before = after
    raise UnsettledError("processes were orphaned as fast as they were listed")


def _children_of(pid: int) -> set[bytes]:
    """Return the ids of a process's children, of all its threads."""
    found: set[bytes] = set()
    for task in tasks_of(pid):
        try:
            found.update(proc_files.words(proc_files.read(f"{task}/children")))
        except (FileNotFoundError, ProcessLookupError):
            if not is_gone(task):
                raise
    return found


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


_Result = TypeVar("_Result")

#: A pipe's buffer; the seccomp filter denies larger ones where no control group counts memory.
_PIPE_BYTES: Final = 64 << 10
#: Least kernel memory of a name in a memory file system: inode and directory entry.
_NAME_BYTES: Final = 1 << 10
_SEND_BUFFER: Final = "/proc/sys/net/core/wmem_default"
_SEND_BUFFER_BYTES: Final = 212_992
#: How often processes are listed again to find new ones.
_MOST_LISTINGS: Final = 20
#: Files that a process holds without a descriptor or a mapping; unmapping its program does not release it.
_LINKS: Final = ("exe", "cwd", "root")
#: Errors for a process, a thread or a descriptor that ended while it was read.
_GONE: Final = (FileNotFoundError, ProcessLookupError)


@dataclass(kw_only=True)
class Holdings:
    """Resources of a set of processes at one moment; keys and sets are inode numbers."""

    #: Unlinked files and directories that are open, executed or current, with their bytes on disk.
    unlinked: dict[int, int] = field(default_factory=dict)
    #: Unlinked files that are mapped; their size is not visible.
    mapped: set[int] = field(default_factory=set)
    #: Sockets, with the number of descriptors in flight in each.
    sockets: dict[int, int] = field(default_factory=dict)
    pipes: set[int] = field(default_factory=set)

    def disk_bytes(self, *, most_file_bytes: int) -> int:
        """Return the bytes of unlinked files; each of unknown size counts ``most_file_bytes``."""
        unseen = len(self.mapped - self.unlinked.keys()) + sum(self.sockets.values())
        return sum(self.unlinked.values()) + unseen * most_file_bytes

    def buffer_bytes(self) -> int:
        """Return the most memory that the buffers of sockets and pipes may use."""
        return len(self.sockets) * _send_buffer_bytes() + len(self.pipes) * _PIPE_BYTES


@dataclass(frozen=True, kw_only=True)
class _FileSystem:
    """The file system whose files are counted."""

    #: Device number of ``stat``; that of the subvolume where there are subvolumes.
    device: int
    #: Device numbers as ``maps`` may print them.
    names: Collection[str]


def hold_of_all(list_processes: Callable[[], list[int]], *, root: Path) -> Holdings:
    """Return the holdings of processes, listed again until a listing has no new ones.

    Otherwise processes that pass on their descriptors and end, one after the other, would never be seen.

    Args:
        root: directory on the file system whose files are counted.

    Raises:
        UnsettledError: each of 20 listings had new processes.
        OSError: a process that has not ended cannot be read.
        proc_files.FormatError: the kernel's text about one cannot be parsed.
    """
    found, counted, seen = Holdings(), _file_system_of(root), set[int]()
    for _ in range(_MOST_LISTINGS):
        fresh = [pid for pid in list_processes() if pid not in seen]
        if not fresh:
            return found
        for pid in fresh:
            _add_process(found, pid, counted)
        seen.update(fresh)
    raise UnsettledError("new processes started as fast as they were read")


def sockets_in_sockets(pids: Iterable[int], held: Holdings) -> set[int]:
    """Return the sockets of a sandbox that no process has open, because they are in flight in another.

    Descriptors in flight in those are visible nowhere. A socket that was just created may be among
    them; one that is still there at the next check was not. Empty where the sandbox has no network
    namespace of its own: there the list is that of the host.
    """

    def listed(task: str) -> set[int]:
        if os.stat(f"{task}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return set()
        return proc_files.unix_sockets(proc_files.lines_of(f"{task}/net/unix"))

    nothing: set[int] = set()
    # A connection that has not been accepted yet has inode number 0.
    return _of_first(pids, listed, nothing) - held.sockets.keys() - {0}


def names_bytes(pids: Iterable[int]) -> int:
    """Return the kernel memory of names in the memory file systems that a sandbox may write to."""

    def used(task: str) -> int:
        areas = [os.statvfs(f"{task}/root/{path}") for path in ("tmp", "dev/shm")]
        return sum((area.f_files - area.f_ffree) * _NAME_BYTES for area in areas)

    return _of_first(pids, used, 0)


def waiting_at(descriptor: int) -> int:
    """Return how many descriptors are in flight to a socket of this process."""
    return proc_files.descriptors_in_flight(proc_files.read(f"/proc/self/fdinfo/{descriptor}"))


def _of_first(pids: Iterable[int], ask: Callable[[str], _Result], nothing: _Result) -> _Result:
    """Return ``ask`` of the first thread that has not ended, of any process; ``nothing`` when all have."""
    for task in (task for pid in pids for task in tasks_of(pid)):
        try:
            return ask(task)
        except OSError:
            if not is_gone(task):
                raise
    return nothing


def _add_process(found: Holdings, pid: int, counted: _FileSystem) -> None:
    is_mapped = False
    for task in tasks_of(pid):
        try:
            for name in _LINKS:
                _add_link(found, f"{task}/{name}", counted.device)
            for name in os.listdir(f"{task}/fd"):
                _add_descriptor(found, task, name, counted.device)
            if not is_mapped and not is_gone(task):  # threads share their memory
                found.mapped |= proc_files.deleted_mappings(
                    proc_files.lines_of(f"{task}/maps"), counted.names
                )
                is_mapped = True
        except OSError:
            if not is_gone(task):
                raise


def _add_descriptor(found: Holdings, task: str, name: str, device: int) -> None:
    try:
        info = os.stat(f"{task}/fd/{name}")
        _add_unlinked(found, info, device)
        if stat.S_ISSOCK(info.st_mode):
            waiting = proc_files.descriptors_in_flight(proc_files.read(f"{task}/fdinfo/{name}"))
            found.sockets[info.st_ino] = max(waiting, found.sockets.get(info.st_ino, 0))
        elif stat.S_ISFIFO(info.st_mode):
            found.pipes.add(info.st_ino)
    except _GONE:
        return


def _add_link(found: Holdings, link: str, device: int) -> None:
    try:
        _add_unlinked(found, os.stat(link), device)
    except _GONE:
        return


def _add_unlinked(found: Holdings, info: os.stat_result, device: int) -> None:
    """Count an unlinked file of any kind: a directory keeps the blocks of names that it once had."""
    if info.st_nlink == 0 and info.st_dev == device:
        found.unlinked[info.st_ino] = info.st_blocks * 512


def _file_system_of(root: Path) -> _FileSystem:
    """Return the device numbers of a directory's file system; ``maps`` does not print those of subvolumes."""
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        device = os.fstat(fd).st_dev
        mount = proc_files.mount_id(proc_files.read(f"/proc/self/fdinfo/{fd}"))
    finally:
        os.close(fd)
    numbers = {(os.major(device), os.minor(device))}
    for found in proc_files.mounts(proc_files.read("/proc/self/mountinfo")):
        if found.id == mount:
            major, _, minor = found.device.partition(":")
            numbers.add((int(major), int(minor)))
    return _FileSystem(device=device, names={f"{major:02x}:{minor:02x}" for major, minor in numbers})


@cache
def _send_buffer_bytes() -> int:
    try:
        return proc_files.number(proc_files.read(_SEND_BUFFER))
    except FileNotFoundError:  # older kernels show it outside of containers only
        return _SEND_BUFFER_BYTES
