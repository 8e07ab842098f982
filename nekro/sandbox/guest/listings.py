"""Lists of directories: sorted, so that a program that is run again meets files in the same order, and
without what the system itself has put among the files of a chat.

The functions of ``os`` are replaced once, before a package is imported; ``glob``, ``pathlib``, ``os.walk``
and ``shutil`` use them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from nekro.sandbox.guest.readings import unbound

if TYPE_CHECKING:
    from typing import Any

__all__ = ["UNDO_NAME", "hide", "replace_listings"]

#: Directory of what was in the files before the program changed them (``undo_log``); as on the host.
UNDO_NAME = ".nekro-undo"
#: Links that lists omit, by name, and what they lead to.
HIDDEN: dict[str, str] = {}


def hide(name: str, target: str) -> None:
    """Omit a link of this name that leads to this target."""
    HIDDEN[name] = target


def replace_listings() -> None:
    """Replace ``os.listdir`` and ``os.scandir``."""
    listdir, scandir = os.listdir, os.scandir

    @unbound(listdir)
    def list_sorted(path: Any = None) -> Any:
        names = listdir(path)
        names.sort()
        return [name for name in names if not is_hidden(path, name)]

    @unbound(scandir)
    def scan_sorted(path: Any = None) -> Any:
        with scandir(path) as found:
            entries = [entry for entry in found if not is_hidden(path, entry.name)]
        entries.sort(key=lambda entry: entry.name)
        return Entries(entries)

    os.listdir, os.scandir = list_sorted, scan_sorted
    os.supports_fd.update((list_sorted, scan_sorted))


def is_hidden(directory: Any, name: Any) -> bool:
    """Whether an entry of a directory is one that lists omit."""
    text = name if type(name) is str else os.fsdecode(name)
    if text == UNDO_NAME:
        return True
    target = HIDDEN.get(text)
    if target is None:
        return False
    try:
        if type(directory) is int:
            return os.readlink(text, dir_fd=directory) == target
        return os.readlink(os.path.join(os.fsdecode(directory or "."), text)) == target
    except OSError:
        return False


class Entries:
    """The entries of ``os.scandir``."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Yield no more."""
        self._entries = iter(())
