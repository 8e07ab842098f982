"""Locate this process's control groups, read and write their files, kill their processes.

Source: cgroups(7), proc_pid_mountinfo(5), Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from nekro.sandbox.limits import proc_files
from nekro.sandbox.models import GONE_SECONDS

__all__ = [
    "KILL_POLL_SECONDS",
    "counter",
    "group_mounts",
    "kill_all",
    "number",
    "open_all",
    "own_directory",
    "pids_in",
    "set_and_verify",
    "words",
    "write",
]

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
#: Interval of checks whether killed processes are gone: about what the kernel needs; results wait for it.
KILL_POLL_SECONDS: Final = 0.002


def group_mounts(data: bytes) -> dict[str, tuple[Path, str]]:
    """Map controller (``""`` for version 2) to (mount point, root of the mount within its hierarchy)."""
    mounts: dict[str, tuple[Path, str]] = {}
    for mount in proc_files.mounts(data):
        names = {"cgroup2": ("",), "cgroup": mount.options}.get(mount.kind, ())
        at = Path(os.fsdecode(mount.point)), os.fsdecode(mount.root)
        mounts.update(dict.fromkeys(names, at))
    return mounts


def own_directory(controller: str, mounts: Mapping[str, tuple[Path, str]], own: Mapping[str, str]) -> Path:
    """Return the directory of this process's group.

    Raises:
        LookupError: the hierarchy is not mounted, or the mount does not show the group.
    """
    version = f"cgroup v1 {controller}" if controller else "cgroup v2"
    if controller not in mounts or controller not in own:
        raise LookupError(f"{version} is not mounted")
    point, root = mounts[controller]
    relative = os.path.relpath(own[controller], root)
    # In a container the mount may show another part of the hierarchy than this process's group.
    path = point if relative.startswith("..") else point / relative
    if not path.is_dir():
        raise LookupError(f"{version}: {path} does not exist")
    return path


def set_and_verify(path: Path, value: int | str) -> None:
    """Write a limit and read it back.

    Raises:
        OSError: the file does not exist, the kernel refused, or it keeps another value.
    """
    write(path, value)
    kept = proc_files.read(path).strip().decode("ascii", "replace")
    if kept == str(value):
        return
    # The kernel rounds bytes down to whole pages.
    if isinstance(value, int) and kept.isdigit() and value - _PAGE_BYTES < int(kept) <= value:
        return
    raise OSError(f"{path} keeps {kept!r} instead of {value}")


def write(path: Path, value: int | str) -> None:
    """Write a value; OSError when the file does not exist or the kernel refuses."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def open_all(paths: Iterable[Path]) -> list[int]:
    """Open files for writing; the caller closes the descriptors."""
    found: list[int] = []
    try:
        for path in paths:
            found.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except BaseException:
        for fd in found:
            os.close(fd)
        raise
    return found


def number(path: Path) -> int:
    """Read one number; OSError when it cannot be read."""
    return proc_files.number(proc_files.read(path))


def words(path: Path) -> list[str]:
    """Read the words of a file; OSError when it cannot be read."""
    return [word.decode("ascii") for word in proc_files.words(proc_files.read(path))]


def counter(path: Path, name: str) -> int:
    """Read one counter of a ``name value`` file; 0 when it cannot be read, as kernels differ in them."""
    try:
        return proc_files.counter(proc_files.read(path), name.encode())
    except OSError:
        return 0


def pids_in(path: Path) -> list[int]:
    """Return the process ids that a ``cgroup.procs`` lists.

    Raises:
        OSError: it cannot be read; an empty list would mean that the sandbox has ended.
    """
    return [int(word) for word in words(path)]


def kill_all(members: Callable[[], list[int]]) -> bool:
    """Kill processes until ``members`` lists none; False when some still run after 10 s.

    The caller prevents them from forking faster. A reused process id is not hit: a process is
    killed by descriptor, after it was listed again.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while listed := _listed(members):
        for pid in listed:
            _kill_member(pid, members)
        if time.monotonic() > deadline:
            return False
        time.sleep(KILL_POLL_SECONDS)
    return True


def _listed(members: Callable[[], list[int]]) -> list[int]:
    try:
        return members()
    except OSError:  # the group is gone
        return []


def _kill_member(pid: int, members: Callable[[], list[int]]) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:  # it has ended
        return
    try:
        if pid in _listed(members):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
