"""What processes hold that neither their directory nor their resident memory shows.

A file without a name takes disk until its last descriptor and its last mapping are gone, and a
descriptor may be on its way through a socket, where no process has it. The buffers of sockets and
pipes and the names in ``/tmp`` are the kernel's memory, which only a control group counts.

Source: proc_pid_fdinfo(5), proc_pid_maps(5), unix(7), pipe(7), tmpfs(5).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["Holdings", "hold_of", "names_bytes", "sockets_in_sockets", "waiting_at"]

#: A pipe's buffer; the filter denies to enlarge it where nobody counts it.
_PIPE_BYTES: Final = 64 << 10
#: What a name in a memory file system takes of the kernel's memory at least: inode and entry.
_NAME_BYTES: Final = 1 << 10
_SEND_BUFFER: Final = Path("/proc/sys/net/core/wmem_default")
_SEND_BUFFER_BYTES: Final = 212_992
_DELETED: Final = " (deleted)"


@dataclass(kw_only=True)
class Holdings:
    """What a set of processes held when it was looked at; sets are of inode numbers."""

    #: Open files without a name, with their bytes on disk.
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


def hold_of(pids: Iterable[int], *, root: Path) -> Holdings:
    """Look at processes.

    Args:
        root: directory on the file system whose files count.
    """
    device = os.stat(root).st_dev
    found = Holdings()
    for pid in pids:
        # A process that ends meanwhile, or a descriptor that is closed, must not hide the others.
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    _add_descriptor(found, pid, name, device)
        with contextlib.suppress(OSError):
            _add_mappings(found, Path(f"/proc/{pid}/maps").read_text("utf-8", "replace"), device)
    return found


def sockets_in_sockets(pid: int, held: Holdings) -> set[int]:
    """Return the sockets of a sandbox that no process has, so that they wait to be received by another.

    What waits in those can be seen nowhere. A socket that was just made may be among them; one
    that is still there at the next look was not just made. Empty where the sandbox has no network
    of its own: the sockets of the host are no sign of anything.
    """
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return set()
        lines = Path(f"/proc/{pid}/net/unix").read_text("utf-8", "replace").splitlines()[1:]
        # A connection that nobody has accepted yet has no inode number.
        return {int(line.split(maxsplit=7)[6]) for line in lines} - held.sockets.keys() - {0}
    return set()


def names_bytes(pid: int) -> int:
    """Return the memory of names in the memory file systems that a process's sandbox may write."""
    used = 0
    for path in ("tmp", "dev/shm"):
        with contextlib.suppress(OSError):
            info = os.statvfs(f"/proc/{pid}/root/{path}")
            used += (info.f_files - info.f_ffree) * _NAME_BYTES
    return used


def waiting_at(descriptor: int) -> int:
    """Return how many descriptors wait to be received by a socket of this process."""
    try:
        return _waiting_in(Path(f"/proc/self/fdinfo/{descriptor}").read_text())
    except OSError:  # closed: what waited in it is gone
        return 0


def _add_descriptor(found: Holdings, pid: int, name: str, device: int) -> None:
    info = os.stat(f"/proc/{pid}/fd/{name}")
    if stat.S_ISREG(info.st_mode):
        if info.st_nlink == 0 and info.st_dev == device:
            found.unlinked[info.st_ino] = info.st_blocks * 512
    elif stat.S_ISSOCK(info.st_mode):
        found.sockets[info.st_ino] = _waiting_in(Path(f"/proc/{pid}/fdinfo/{name}").read_text())
    elif stat.S_ISFIFO(info.st_mode):
        found.pipes.add(info.st_ino)


def _waiting_in(fdinfo: str) -> int:
    for line in fdinfo.splitlines():
        if line.startswith("scm_fds:"):
            return int(line.split()[1])
    return 0


def _add_mappings(found: Holdings, maps: str, device: int) -> None:
    number = f"{os.major(device):02x}:{os.minor(device):02x}"
    for line in maps.splitlines():
        if line.endswith(_DELETED):
            fields = line.split(maxsplit=5)
            if fields[3] == number:
                found.mapped.add(int(fields[4]))


def _send_buffer_bytes() -> int:
    try:
        return int(_SEND_BUFFER.read_text())
    except (OSError, ValueError):
        return _SEND_BUFFER_BYTES
