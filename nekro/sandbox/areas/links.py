"""The links that make ``shared/x`` and ``uploads/x`` valid names while programs run that mention the areas.

The guest makes them (``nekro.sandbox.guest.working_directory``). Programs of several processes of a host may
use the same shared files at the same time, so the last one to end removes the links. A lock of an open file
shows whether there are others: it needs no file of its own, and does not meet the locks of other kinds that
hold the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["ProgramLinks", "mentions_areas"]

#: As in the guest, whose modules the host does not import.
_NAMES: Final = ("shared", "uploads")
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_LOCK: Final = struct.Struct("hhqqi4x")


def mentions_areas(texts: Iterable[str]) -> bool:
    """Whether a program with these texts, its code and its variables, may get links."""
    return any(name in text for text in texts for name in _NAMES)


class ProgramLinks:
    """One program's use of the links in its shared files."""

    def __init__(self, directory: Path) -> None:
        """Keep the links until ``end``, also where the program of another process ends before."""
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # no locks on this file system: the first one to end removes them
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, 0, 0, 0, 0))

    def end(self) -> None:
        """Remove the links unless another program uses them; call it once."""
        try:
            if self._has_others():
                return
            targets = {name: target for name in _NAMES if (target := self._remove(name)) is not None}
            if targets and self._has_others():  # it started meanwhile, and has seen them
                for name, target in targets.items():
                    with contextlib.suppress(OSError):
                        os.symlink(target, name, dir_fd=self._fd)
        finally:
            os.close(self._fd)

    def _has_others(self) -> bool:
        try:
            answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        except OSError:
            return False
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _remove(self, name: str) -> str | None:
        """Remove a link; returns what it led to, None if there is no link of this name."""
        try:
            target = os.readlink(name, dir_fd=self._fd)
            os.unlink(name, dir_fd=self._fd)
        except OSError:
            return None
        return target
