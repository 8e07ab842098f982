"""What processes hold that neither their directory nor their resident memory shows.

A file or directory without a name takes disk until its last descriptor and its last mapping are gone
and no process runs it or works in it. A descriptor may be on its way through a socket, where no process
has it. The buffers of sockets and pipes and the names in ``/tmp`` are the kernel's memory, which only a
control group counts.

Source: proc_pid_fdinfo(5), proc_pid_maps(5), unix(7), pipe(7), tmpfs(5).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from sandbox import proc_files
from sandbox.processes import UnsettledError, is_gone, tasks_of

__all__ = ["Holdings", "hold_of", "hold_of_all", "names_bytes", "sockets_in_sockets", "waiting_at"]

_Result = TypeVar("_Result")

#: A pipe's buffer; the filter denies to enlarge it where nobody counts it.
_PIPE_BYTES: Final = 64 << 10
#: What a name in a memory file system takes of the kernel's memory at least: inode and entry.
_NAME_BYTES: Final = 1 << 10
_SEND_BUFFER: Final = "/proc/sys/net/core/wmem_default"
_SEND_BUFFER_BYTES: Final = 212_992
#: How often processes are listed again for ones that came meanwhile.
_MOST_LISTINGS: Final = 20
#: What a process holds without a descriptor or a mapping: its program stays, whatever it unmaps.
_LINKS: Final = ("exe", "cwd", "root")
#: A process, a thread or a descriptor that went while it was looked at.
_GONE: Final = (FileNotFoundError, ProcessLookupError)


@dataclass(kw_only=True)
class Holdings:
    """What a set of processes held when it was looked at; sets are of inode numbers."""

    #: Files and directories without a name that are open, in use or run, with their bytes on disk.
    unlinked: dict[int, int] = field(default_factory=dict)
    #: Mapped files without a name; their size cannot be seen.
    mapped: set[int] = field(default_factory=set)
    #: Sockets, with how many descriptors wait in each to be received.
    sockets: dict[int, int] = field(default_factory=dict)
    pipes: set[int] = field(default_factory=set)

    def disk_bytes(self, *, most_file_bytes: int) -> int:
        """Return what files without a name take; where their size cannot be seen, the largest one."""
        unseen = len(self.mapped - self.unlinked.keys()) + sum(self.sockets.values())
        return sum(self.unlinked.values()) + unseen * most_file_bytes

    def buffer_bytes(self) -> int:
        """Return how much memory the buffers of sockets and pipes may take."""
        return len(self.sockets) * _send_buffer_bytes() + len(self.pipes) * _PIPE_BYTES


@dataclass(frozen=True, kw_only=True)
class _FileSystem:
    """The file system whose files count."""

    #: As ``stat`` says; of a subvolume where there are some.
    device: int
    #: As ``maps`` may write it.
    names: Collection[str]


def hold_of(pids: Iterable[int], *, root: Path) -> Holdings:
    """Look at processes, each thread of them.

    Args:
        root: directory on the file system whose files count.

    Raises:
        OSError: a process that is not gone cannot be read.
        proc_files.FormatError: what the kernel says of one cannot be understood.
    """
    found, counted = Holdings(), _file_system_of(root)
    for pid in pids:
        _add_process(found, pid, counted)
    return found


def hold_of_all(list_processes: Callable[[], list[int]], *, root: Path) -> Holdings:
    """Look at processes until a listing names none that was not looked at.

    Otherwise processes that hand on what they hold and end, one after the other, would never be seen.

    Raises:
        UnsettledError: new ones came all the time.
        OSError: as ``hold_of``; ``FormatError`` too.
    """
    found, counted, seen = Holdings(), _file_system_of(root), set[int]()
    for _ in range(_MOST_LISTINGS):
        fresh = [pid for pid in list_processes() if pid not in seen]
        if not fresh:
            return found
        for pid in fresh:
            _add_process(found, pid, counted)
        seen.update(fresh)
    raise UnsettledError("new processes came as fast as they were looked at")


def sockets_in_sockets(pids: Iterable[int], held: Holdings) -> set[int]:
    """Return the sockets of a sandbox that no process has, so that they wait to be received by another.

    What waits in those can be seen nowhere. A socket that was just made may be among them; one
    that is still there at the next look was not just made. Empty where the sandbox has no network
    of its own: the sockets of the host are no sign of anything.
    """

    def listed(pid: int) -> set[int]:
        if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return set()
        return proc_files.unix_sockets(proc_files.lines_of(f"/proc/{pid}/net/unix"))

    nothing: set[int] = set()
    # A connection that nobody has accepted yet has no inode number.
    return _of_first(pids, listed, nothing) - held.sockets.keys() - {0}


def names_bytes(pids: Iterable[int]) -> int:
    """Return the memory of names in the memory file systems that a sandbox's processes may write."""

    def used(pid: int) -> int:
        areas = [os.statvfs(f"/proc/{pid}/root/{path}") for path in ("tmp", "dev/shm")]
        return sum((area.f_files - area.f_ffree) * _NAME_BYTES for area in areas)

    return _of_first(pids, used, 0)


def waiting_at(descriptor: int) -> int:
    """Return how many descriptors wait to be received by a socket of this process."""
    return proc_files.descriptors_in_flight(proc_files.read(f"/proc/self/fdinfo/{descriptor}"))


def _of_first(pids: Iterable[int], ask: Callable[[int], _Result], nothing: _Result) -> _Result:
    """Ask the first process that is not gone; ``nothing`` when all are."""
    for pid in pids:
        try:
            return ask(pid)
        except OSError:
            if not is_gone(f"/proc/{pid}"):
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
    """Count what has no name, of any kind: a directory keeps the blocks of the names that it once had."""
    if info.st_nlink == 0 and info.st_dev == device:
        found.unlinked[info.st_ino] = info.st_blocks * 512


def _file_system_of(root: Path) -> _FileSystem:
    """Say how the file system of a directory is named; ``maps`` names subvolumes by their whole."""
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
