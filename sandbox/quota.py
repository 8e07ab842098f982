"""How much of the disk ``/app/shared`` takes: measured, and cut back when a run wrote too much.

No resource limit bounds many small files, and a quota of the file system would need another
file system per chat. So the directory is measured while code runs; between two looks a run
can write more than its quota, and what it wrote over it is taken away when it has ended.
"""

from __future__ import annotations

import contextlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro_agent.errors import InvalidValueError
from nekro_agent.tools import safe_files

__all__ = ["Quota"]

#: File times come from a clock that ticks: a file may look that much older than it is.
_CLOCK_TICK_SECONDS: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What one directory may hold while one run lasts."""

    root: Path
    most_bytes: int
    most_names: int

    @classmethod
    def at_start(cls, root: Path, settings: SandboxSettings) -> Quota:
        """Measure ``root`` before a run: what is over the settings' limits already may stay."""
        used_bytes, names = safe_files.measure(root, max_entries=4 * settings.shared_files)
        return cls(
            root=root,
            most_bytes=max(settings.shared_bytes, used_bytes),
            most_names=max(settings.shared_files, names),
        )

    @classmethod
    def of_scratch(cls, root: Path, settings: SandboxSettings) -> Quota:
        """Bound a directory that is the code's ``/tmp`` and goes with it."""
        return cls(root=root, most_bytes=settings.tmp_bytes, most_names=settings.shared_files)

    def exceeded(self, *, unlinked: int = 0) -> bool:
        """Whether the directory holds too much now, or directories too deep to be measured.

        Args:
            unlinked: bytes of open files that have no name any more.
        """
        used_bytes, names = unlinked, 0
        for node in safe_files.walk(self.root, max_entries=self.most_names + 1):
            used_bytes += node.info.st_blocks * 512
            names += 1
            if node.is_hidden or used_bytes > self.most_bytes:
                return True
        return names > self.most_names or used_bytes > self.most_bytes

    def cut_back(self, *, since: float) -> int:
        """Remove files that changed after ``since``, newest first, until the rest fits.

        By the time of the last change, which no program can set. Directories too deep to be
        measured go altogether. Returns how many files went.
        """
        since -= _CLOCK_TICK_SECONDS
        with contextlib.suppress(OSError):
            safe_files.remove_hidden(self.root)
        nodes = list(safe_files.walk(self.root, max_entries=1_000_000))
        used_bytes = sum(node.info.st_blocks * 512 for node in nodes)
        names = len(nodes)
        removed = 0
        for node in sorted(nodes, key=lambda node: node.info.st_ctime, reverse=True):
            if (used_bytes <= self.most_bytes and names <= self.most_names) or node.info.st_ctime < since:
                break
            if stat.S_ISDIR(node.info.st_mode):
                continue
            with contextlib.suppress(OSError, InvalidValueError):
                safe_files.remove_file(self.root, node.path)
                used_bytes -= node.info.st_blocks * 512
                names -= 1
                removed += 1
        return removed
