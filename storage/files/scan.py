"""How a directory of an area differs from what is known of it.

Programs may change the directory during a scan. What they write meanwhile may or may not be in its result; it
is found by the next scan, because a change has another time, inode or size than what was taken.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.safe_paths import walk
from storage.files.local_state import FileStat, Known, stat_of
from storage.files.paths import checked_path, folded_path, parents_of

__all__ = ["MOST_NAMES", "Scan", "scan_directory", "settled"]

#: Most names of a directory that are looked at; one with more is refused.
MOST_NAMES: Final = 2_000_000
#: Longest time within which Linux gives two changes of a file one time.
_TICK_NS: Final = 10_000_000
#: Copies, uploads and downloads that are not finished, or whose host died.
_UNFINISHED: Final = re.compile(
    r"\.[0-9a-f]{16}\.(part|download)|\..+\.[0-9a-f]{12}\.part(\.json|\.new)?", re.DOTALL
)


@dataclass(kw_only=True)
class Scan:
    """How a directory differs from what is known of it."""

    changed: list[tuple[str, os.stat_result]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    #: Of all that the area may have, and of its files.
    names: int = 0
    bytes: int = 0
    #: Files whose owner, mode or inode differs, but nothing that a version has.
    unchanged: list[Known] = field(default_factory=list)

    @property
    def differences(self) -> dict[str, FileStat | None]:
        """What shows that files have changed again, by path."""
        return {path: stat_of(info) for path, info in self.changed} | dict.fromkeys(self.removed)


def scan_directory(directory: Path, known: Mapping[str, Known]) -> Scan:
    scan = Scan()
    nodes = sorted(
        ((node.path, node.info, node.is_hidden) for node in walk(directory, max_entries=MOST_NAMES)),
        key=lambda node: node[0],
    )
    # Of those that are still here: a name may have changed in case only.
    by_fold = {folded_path(path): path for path, _, _ in nodes if path in known}
    seen: set[str] = set()
    out: set[str] = set()
    for path, info, is_hidden in nodes:
        if path not in known and _UNFINISHED.fullmatch(path.rpartition("/")[2]):
            continue
        reason = _why_left_out(path, info, is_hidden=is_hidden, by_fold=by_fold)
        if reason is None and not out.isdisjoint(parents_of(path)):
            reason = "its directory is left out"
        if reason is not None:
            out.add(path)
            scan.left_out[ascii(path)] = reason
            continue
        by_fold[folded_path(path)] = path
        seen.add(path)
        old = known.get(path)
        is_directory = stat.S_ISDIR(info.st_mode)
        scan.names += 1
        scan.bytes += 0 if is_directory else info.st_size
        if (
            old is None
            or is_directory != (old.stat is None)
            or (not is_directory and old.stat != stat_of(info))
        ):
            scan.changed.append((path, info))
    # What is left out now keeps its version: it was not deleted.
    scan.removed = [path for path in known if path not in seen and path not in out]
    return scan


def _why_left_out(path: str, info: os.stat_result, *, is_hidden: bool, by_fold: dict[str, str]) -> str | None:
    if is_hidden:
        return "it is too deep"
    if stat.S_ISREG(info.st_mode) and info.st_nlink != 1:
        return "it has a second name (hard link)"
    if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
        return "it is neither a file nor a directory"
    try:
        checked_path(path)
    except InvalidValueError as exc:
        return str(exc)
    other = by_fold.get(folded_path(path), path)
    if other != path:
        return f"it differs from {other!a} only in case or in the form of its letters"
    return None


def settled(fd: int) -> os.stat_result:
    """Return the status of a file whose next change will have another time."""
    info = os.fstat(fd)
    age_ns = time.time_ns() - info.st_ctime_ns
    if 0 <= age_ns < _TICK_NS:
        time.sleep((_TICK_NS - age_ns) / 1e9)
        info = os.fstat(fd)
    return info
