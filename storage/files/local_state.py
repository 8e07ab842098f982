"""What a host knows of its directory of an area: the version that it was made from, and its files.

The file of a state lies out of the reach of programs in sandboxes. Several processes of a host use it in
turns (``storage.files.host_files``), so each reads it again when it has changed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from nekro_agent.files.private_files import write_private
from storage.files.manifest import Entry

__all__ = ["NO_STAT", "FileStat", "Known", "LocalState", "stat_of"]

#: Inode, size, modification and change time.
FileStat = tuple[int, int, int, int]

#: Of a file that was changed before it was known, so that it differs from what is known.
NO_STAT: Final = (0, 0, 0, 0)
#: Retention keeps what older versions had for longer.
_RECENT_SECONDS: Final = 6 * 3600


@dataclass(kw_only=True)
class Known:
    """A file or directory that a directory and a version have alike."""

    entry: Entry
    #: None: a directory.
    stat: FileStat | None = None


def stat_of(info: os.stat_result) -> FileStat:
    """Return what shows that a file was not changed."""
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class LocalState:
    """The state of one directory; use it in one process and task at a time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Known] = {}
        #: Of the file when this object read or wrote it.
        self._seen: FileStat | None = None
        self._saved_at = 0.0
        #: Version that the directory was made from; None: the directory may be incomplete, 0: there is none.
        self.version: int | None = None

    @property
    def known(self) -> Mapping[str, Known]:
        """What the directory and the version have, by path."""
        return MappingProxyType(self._known)

    @property
    def is_new(self) -> bool:
        """Whether no process has ever used the directory as that of an area."""
        return self._seen is None and self.version is None

    def is_recent(self) -> bool:
        """Whether the manifest still has all that has changed since the version."""
        return time.time() - self._saved_at < _RECENT_SECONDS

    def differs(self, entry: Entry) -> bool:
        """Whether a version has something else at a path than is known."""
        known = self._known.get(entry.path)
        return known is None or known.entry != entry

    def keep(self, known: Known) -> None:
        """Take note of a file or directory."""
        self._known[known.entry.path] = known

    def forget(self, path: str) -> None:
        """Take note that there is none."""
        self._known.pop(path, None)

    def replace(self, known: dict[str, Known], *, version: int | None) -> None:
        """Take note of all at once."""
        self._known, self.version = known, version

    def load(self) -> None:
        """Read the file if another process has written it; a file that cannot be read is as none."""
        try:
            info = self._file.stat()
            if stat_of(info) == self._seen:
                return
            data = json.loads(self._file.read_bytes())
            known = {row[0]: _known_of(row) for row in data["known"]}
            version = data["version"]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            self._known, self.version, self._seen = {}, None, None
            return
        self._known, self.version = known, version
        self._saved_at, self._seen = info.st_mtime, stat_of(info)

    def remove(self) -> None:
        """Forget all, also for the next process."""
        self._file.unlink(missing_ok=True)
        self._known, self.version, self._seen = {}, None, None

    def save(self) -> None:
        """Write the file for the next process."""
        known = [[*vars(one.entry).values(), one.stat] for one in self._known.values()]
        write_private(
            self._file, json.dumps({"version": self.version, "known": known}, separators=(",", ":"))
        )
        info = self._file.stat()
        self._saved_at, self._seen = info.st_mtime, stat_of(info)


def _known_of(row: list[Any]) -> Known:
    path, content_id, sha256, size, is_executable, modified_ns, stat = row
    entry = Entry(
        path=path,
        content_id=content_id,
        sha256=sha256,
        bytes=size,
        is_executable=is_executable,
        modified_ns=modified_ns,
    )
    return Known(entry=entry, stat=None if stat is None else tuple(stat))
