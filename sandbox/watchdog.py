"""Looks after a running sandbox where the kernel does not: disk always, memory without cgroups."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from sandbox.drivers.base import Sandbox, Usage
from sandbox.holdings import hold_of, names_bytes, sockets_in_sockets, waiting_at
from sandbox.models import Limit
from sandbox.quota import Quota

__all__ = ["processes_beside", "usage_of", "watch_disk", "watch_memory"]

_MEMORY_SECONDS: Final = 0.05
_DISK_SECONDS: Final = 0.1
#: A look may cost this part of the time between looks, however many files there are.
_LARGEST_SHARE: Final = 1 / 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


async def watch_memory(sandbox: Sandbox, *, settings: SandboxSettings, end: Callable[[Limit], None]) -> None:
    """End the run when its processes together use too much; sound up to the time between looks."""

    def exceeded() -> bool:
        most_bytes = settings.memory_bytes - _kernel_bytes(sandbox)
        used_bytes = sandbox.usage().memory_bytes or 0
        # That counts pages once for each process that shares them: cheap, and never too little.
        return used_bytes > most_bytes and shared_out(sandbox.processes()) > most_bytes

    # Most runs have ended before the first look, and pay for none.
    await asyncio.sleep(_MEMORY_SECONDS)
    while sandbox.alive:
        if await asyncio.to_thread(exceeded):
            end(Limit.MEMORY)
            return
        await asyncio.sleep(_MEMORY_SECONDS)


def _kernel_bytes(sandbox: Sandbox) -> int:
    """Return what the kernel may keep for the code: buffers of sockets and pipes, names in memory."""
    pids = sandbox.processes()
    # Without a /tmp of its own, the names in there are on disk and the disk's watch counts them.
    names = names_bytes(pids[0]) if pids and sandbox.scratch_dir is None else 0
    return hold_of(pids, root=sandbox.spec.shared_dir).buffer_bytes() + names


async def watch_disk(
    sandbox: Sandbox, quota: Quota, *, most_file_bytes: int, end: Callable[[Limit], None]
) -> None:
    """End the run when its shared directory holds too much.

    Args:
        most_file_bytes: what counts for a file of which only that it exists can be seen.
    """

    hidden: set[int] = set()

    def exceeded() -> bool:
        nonlocal hidden
        pids = sandbox.processes()
        held = hold_of(pids, root=quota.root)
        before, hidden = hidden, sockets_in_sockets(pids[0], held) if pids else set()
        if before & hidden:
            return True  # no look can tell how much waits in there
        used_bytes = held.disk_bytes(most_file_bytes=most_file_bytes)
        # Our end of the channel is a socket too, and is not read while enough calls are under way.
        used_bytes += waiting_at(sandbox.writer.get_extra_info("socket").fileno()) * most_file_bytes
        return quota.exceeded(unlinked=used_bytes)

    await asyncio.sleep(_DISK_SECONDS)
    while sandbox.alive:
        begin = time.monotonic()
        if await asyncio.to_thread(exceeded):
            end(Limit.DISK)
            return
        cost = time.monotonic() - begin
        await asyncio.sleep(max(_DISK_SECONDS, cost / _LARGEST_SHARE))


def processes_beside(first_pid: int) -> list[int]:
    """Return the host ids of all processes in a process's pid namespace."""
    try:
        namespace = os.stat(f"/proc/{first_pid}/ns/pid").st_ino
    except OSError:
        return []
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}/ns/pid").st_ino == namespace:
                found.append(int(name))
        except OSError:  # gone, or another user's: none of ours
            continue
    return found


def shared_out(pids: list[int]) -> int:
    """Add up the memory of processes with shared pages counted in parts, in bytes."""
    used_bytes = 0
    for pid in pids:
        try:
            lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
        except OSError:
            # It has ended, or it has made itself unreadable: then it is charged for all it shares.
            used_bytes += usage_of([pid]).memory_bytes or 0
            continue
        used_bytes += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return used_bytes


def usage_of(pids: list[int]) -> Usage:
    """Add up what processes use by their own account."""
    pages = 0
    for pid in pids:
        try:
            pages += int(Path("/proc", str(pid), "statm").read_text().split()[1])
        except OSError:
            continue
    return Usage(memory_bytes=pages * _PAGE_BYTES, processes=len(pids))
