"""Limits of one run, as the pieces that enforce them want them."""

from __future__ import annotations

from broker_config.settings import SandboxSettings
from sandbox.bridge import BridgeLimits

__all__ = ["bridge_limits", "process_limits"]

_LEAST_ADDRESS_SPACE = 1 << 30


def process_limits(settings: SandboxSettings) -> dict[str, int]:
    """Return what the runner sets on itself before it runs code, by ``RLIMIT_`` name.

    Address space is bounded above the memory limit: it turns one greedy allocation into a
    ``MemoryError`` at its line, where the memory limit can only kill.
    """
    return {
        "AS": max(2 * settings.memory_bytes, _LEAST_ADDRESS_SPACE),
        # Not 0: that alone would not keep a core file from a pipe in core_pattern.
        "CORE": 1,
        "CPU": settings.cpu_seconds,
        "FSIZE": settings.max_file_bytes,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "NOFILE": settings.max_open_files,
        "NPROC": settings.max_processes,
    }


def bridge_limits(settings: SandboxSettings) -> BridgeLimits:
    """Return what the bridge enforces."""
    return BridgeLimits(
        argument_bytes=settings.argument_bytes,
        return_bytes=settings.return_bytes,
        max_calls=settings.max_calls,
        max_refused_calls=settings.max_refused_calls,
        max_calls_in_flight=settings.max_calls_in_flight,
        call_seconds=settings.call_seconds,
        unread_seconds=settings.call_seconds,
    )
