"""Determine the limits of a run, and who enforces each: the kernel, the host, a periodic check, or
nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.bridge import BridgeLimits
from nekro.sandbox.driver import Enforcement, Enforcer
from nekro.sandbox.images import check_images
from nekro.sandbox.limits.cgroups import DELEGATE, Cgroups
from nekro.sandbox.variables import frame_bytes
from nekro_agent.errors import SandboxUnavailableError

__all__ = [
    "MAX_OPEN_FILES",
    "bridge_limits",
    "group_limits",
    "is_whole_file_system",
    "other_limits",
    "process_limits",
]

_SWAPS: Final = Path("/proc/swaps")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_OWN_DISK: Final = (
    "as root on one host set NEKRO_SANDBOX__SHARED_STORAGE=image, else mount a file system of its own at {}"
    " (docs/operations.md)"
)


def group_limits(cgroups: Cgroups | None) -> tuple[Enforcement, ...]:
    """Return the enforcement of memory, swap, pids and cpu, with or without control groups."""
    missing = dict.fromkeys(("memory", "swap", "pids", "cpu"), "no control groups")
    if cgroups is not None:
        missing = dict(cgroups.missing)
    without = {
        "memory": (Enforcer.POLLED, "a watchdog checks it every 50 ms"),
        "swap": _without_swap_limit(),
        "pids": (Enforcer.KERNEL, "RLIMIT_NPROC of the code's user"),
        "cpu": (Enforcer.NOTHING, "CPU seconds are limited per process, not for all together"),
    }
    found = []
    for limit, (by, detail) in without.items():
        if cgroups is not None and limit not in missing:
            found.append(Enforcement(limit=limit, by=Enforcer.KERNEL, detail=cgroups.name))
        else:
            fix = "" if by is Enforcer.KERNEL else DELEGATE
            detail = f"{detail} ({missing[limit]})"
            found.append(Enforcement(limit=limit, by=by, detail=detail, fix=fix))
    return tuple(found)


def other_limits(settings: SandboxSettings, shared_root: Path | None) -> tuple[Enforcement, ...]:
    """Return the enforcement of the limits that do not depend on the driver.

    Args:
        shared_root: parent of the shared directories; None where that is not known.
    """
    disk = _disk(settings, shared_root)
    return (
        disk,
        replace(disk, limit="inodes"),
        Enforcement(limit="file_size", by=Enforcer.KERNEL, detail="RLIMIT_FSIZE"),
        Enforcement(limit="wall", by=Enforcer.HOST, detail="a timer, then SIGKILL"),
        Enforcement(limit="output", by=Enforcer.HOST, detail="each byte is counted when it is read"),
    )


def _without_swap_limit() -> tuple[Enforcer, str]:
    try:
        has_swap = len(_SWAPS.read_bytes().split(b"\n")) > 2
    except OSError:
        has_swap = True
    if has_swap:
        return Enforcer.NOTHING, "swapped-out memory is not counted for any run"
    return Enforcer.KERNEL, "this host has no swap"


def _disk(settings: SandboxSettings, shared_root: Path | None) -> Enforcement:
    if settings.shared_storage == "image":
        try:
            check_images(settings, shared_root)
        except (SandboxUnavailableError, OSError) as exc:
            fix = "run the service as root with loop devices, or set NEKRO_SANDBOX__SHARED_STORAGE=directory"
            return Enforcement(limit="disk", by=Enforcer.NOTHING, detail=str(exc), fix=fix, required=True)
        return Enforcement(limit="disk", by=Enforcer.KERNEL, detail="an ext4 image for each container")
    if shared_root is not None and is_whole_file_system(shared_root):
        size = os.statvfs(shared_root)
        return Enforcement(
            limit="disk",
            by=Enforcer.KERNEL,
            detail=f"{shared_root} is a file system of its own with {size.f_blocks * size.f_frsize >> 20} MiB"
            " for all chats together; each chat's usage is measured every 50 ms",
        )
    return Enforcement(
        limit="disk",
        by=Enforcer.POLLED,
        detail="/app/shared is measured every 50 ms while code runs and trimmed afterwards",
        fix=_OWN_DISK.format(shared_root or "<data directory>/sandboxes"),
    )


def is_whole_file_system(directory: Path) -> bool:
    """Whether ``directory`` is the mount point of a whole file system of its own."""
    try:
        if os.stat(directory).st_dev == os.stat(directory.parent).st_dev:
            return False
        lines = _MOUNTS.read_bytes().split(b"\n")
    except OSError:
        return False
    escaped = b"".join(
        b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in os.fsencode(directory.resolve())
    )
    # Fields 4 and 5: the part of the file system that is mounted, and where.
    return any(line.split(b" ")[3:5] == [b"/", escaped] for line in lines)


#: Open descriptors of one process: as much as a program needs, and as few as the disk guard can look at.
MAX_OPEN_FILES: Final = 256

_LEAST_ADDRESS_SPACE = 1 << 30


def process_limits(settings: SandboxSettings, *, others: int = 0) -> dict[str, int]:
    """Return the resource limits that the runner sets before it runs code, by ``RLIMIT_`` name.

    The limit of address space is above the memory limit: it makes a single large allocation raise
    ``MemoryError`` at its line, where the memory limit can only kill.

    Args:
        others: threads that the kernel counts together with those of the code.
    """
    return {
        "AS": max(2 * settings.memory_bytes, _LEAST_ADDRESS_SPACE),
        # 1 instead of 0: with 0, the kernel still passes core dumps to a pipe in core_pattern.
        "CORE": 1,
        "CPU": settings.cpu_seconds,
        "FSIZE": settings.max_file_bytes,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "NOFILE": MAX_OPEN_FILES,
        "NPROC": settings.max_processes + others,
    }


def bridge_limits(settings: SandboxSettings, *, keep_bytes: int = 0) -> BridgeLimits:
    """Return the limits that the bridge enforces.

    Args:
        keep_bytes: as in ``RunRequest``.
    """
    return BridgeLimits(
        argument_bytes=settings.argument_bytes,
        return_bytes=settings.return_bytes,
        max_calls=settings.max_calls,
        max_calls_in_flight=settings.max_calls_in_flight,
        unread_seconds=settings.wall_seconds / 2,
        keep_bytes=frame_bytes(keep_bytes),
    )
