"""Convert the settings into the limits of one run, in the form that their enforcers need."""

from __future__ import annotations

from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.bridge import BridgeLimits
from nekro.sandbox.kept import frame_bytes

__all__ = ["MAX_OPEN_FILES", "bridge_limits", "process_limits"]

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
