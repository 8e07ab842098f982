"""The disk quota of ``/app/shared``: measured while code runs, and enforced by deletion after the run.

No resource limit bounds many small files, and a quota of the file system would need another
file system per chat. So the directory is measured while code runs; between two checks a run
can write more than its quota, and the excess is deleted when the run has ended.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from broker_config.settings import SandboxSettings
from nekro.sandbox.limits.processes import UnsettledError
from nekro_agent.errors import InvalidValueError
from nekro_agent.files import safe_files

__all__ = ["Quota"]

#: File times come from a coarse clock: a file may appear older by this many of its ticks.
_CLOCK_TICKS: Final = 2
#: Names that one pass of ``cut_back`` reads.
_NAMES_PER_PASS: Final = 200_000


@dataclass(frozen=True, kw_only=True)
class Quota:
    """The limits of one directory during one run."""

    root: Path
    most_bytes: int
    #: Files, directories and all other names.
    most_names: int
    #: Disk bytes when the run began.
    used_bytes: int = 0

    @classmethod
    def at_start(cls, root: Path, settings: SandboxSettings) -> Quota:
        """Measure ``root`` before a run: files that already exceed the settings' limits are kept."""
        used_bytes, names = safe_files.measure(root, max_entries=4 * settings.shared_files)
        return cls(
            root=root,
            most_bytes=max(settings.shared_bytes, used_bytes),
            most_names=max(settings.shared_files, names),
            used_bytes=used_bytes,
        )

    @classmethod
    def of_scratch(cls, root: Path, settings: SandboxSettings) -> Quota:
        """Return the quota of a directory that is the code's ``/tmp`` and is deleted after the run."""
        return cls(root=root, most_bytes=settings.tmp_bytes, most_names=settings.shared_files)

    def exceeded(self, *, unlinked: int = 0, most_file_bytes: int = 0) -> bool:
        """Whether the directory exceeds the quota now, or has directories too deep to be measured.

        Args:
            unlinked: bytes of open files that are unlinked.
            most_file_bytes: size assumed for a file that was renamed or removed before it was measured.

        Raises:
            UnsettledError: too many files were renamed meanwhile for an answer.
        """
        used_bytes, names = unlinked, 0
        lost_files = lost_directories = 0

        def lose(is_directory: bool) -> None:
            nonlocal lost_files, lost_directories
            lost_directories += is_directory
            lost_files += not is_directory

        for node in safe_files.walk(self.root, max_entries=self.most_names + 1, on_lost=lose):
            used_bytes += node.info.st_blocks * 512
            names += 1
            if node.is_hidden or used_bytes > self.most_bytes:
                return True
        if names > self.most_names or used_bytes > self.most_bytes:
            return True
        # Programs often rename and remove files: the quota holds if even files of the largest size would fit.
        most_bytes = used_bytes + lost_files * most_file_bytes
        if lost_directories or names + lost_files > self.most_names or most_bytes > self.most_bytes:
            raise UnsettledError(f"{lost_files} files and {lost_directories} directories were renamed")
        return False

    def cut_back(self, *, since: float) -> int:
        """Remove files and directories that changed after ``since``, newest first, until the rest fits.

        Uses the change time, which no program can set. A directory is removed only when it is empty, so
        that no older file in it is lost. Directories too deep to be measured are removed completely.
        Returns how many names were removed.
        """
        since -= _CLOCK_TICKS / os.sysconf("SC_CLK_TCK")
        with contextlib.suppress(OSError):
            safe_files.remove_hidden(self.root)
        total = 0
        while removed := self._cut_once(since):
            total += removed
        return total

    def _cut_once(self, since: float) -> int:
        """Remove the excess among the names of one pass; returns how many names were removed."""
        nodes = list(safe_files.walk(self.root, max_entries=_NAMES_PER_PASS))
        excess = _Excess(
            used_bytes=sum(node.info.st_blocks * 512 for node in nodes) - self.most_bytes,
            names=len(nodes) - self.most_names,
        )
        # With equal times, deeper names first: a directory must be empty to be removed.
        nodes.sort(key=lambda node: (node.info.st_ctime, node.path.count("/")), reverse=True)
        changed = [node for node in nodes if node.info.st_ctime >= since]
        kept = [node for node in changed if not self._remove(node, excess)]
        # Directories that were not empty may be so now; deepest first, as removing one may empty its parent.
        kept.sort(key=lambda node: node.path.count("/"), reverse=True)
        for node in kept:
            self._remove(node, excess)
        return excess.removed

    def _remove(self, node: safe_files.Node, excess: _Excess) -> bool:
        if not excess.is_left:
            return False
        if not self._remove_name(node):
            return False
        excess.used_bytes -= node.info.st_blocks * 512
        excess.names -= 1
        excess.removed += 1
        return True

    def _remove_name(self, node: safe_files.Node) -> bool:
        if stat.S_ISDIR(node.info.st_mode):
            return safe_files.remove_empty(self.root, node.path)
        try:
            safe_files.remove_file(self.root, node.path)
        except (OSError, InvalidValueError):
            return False
        return True


@dataclass(kw_only=True)
class _Excess:
    """The excess that is still to be removed; not positive when the rest fits."""

    used_bytes: int
    names: int
    removed: int = 0

    @property
    def is_left(self) -> bool:
        return self.used_bytes > 0 or self.names > 0
