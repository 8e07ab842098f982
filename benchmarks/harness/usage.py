"""Processor time and memory of whole systems: processes with all below them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from benchmarks.harness.processes import descendants

__all__ = ["tree_cpu_seconds", "tree_pss_bytes", "tree_rss_bytes"]

_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


def tree_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of processes and of all below them, those that have ended included.

    A process that ended counts if its parent waited for it and still runs.
    """
    ticks = 0
    for pid in _trees(pids):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_SECOND


def tree_pss_bytes(pids: Iterable[int]) -> int:
    """Return the proportional memory of processes and of all below them: shared pages are divided."""
    return sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in _trees(pids)) * 1024


def tree_rss_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes and of all below them: shared pages count for each."""
    return sum(_kilobytes(pid, "status", "VmRSS:") for pid in _trees(pids)) * 1024


def _trees(pids: Iterable[int]) -> set[int]:
    return {pid for root in pids for pid in (root, *descendants(root))}


def _kilobytes(pid: int, file: str, name: str) -> int:
    """Return a size that the kernel reports; 0 for a process that has ended or belongs to another user."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text("utf-8", "replace").split("\n")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
