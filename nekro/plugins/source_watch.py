"""Notices that the files of a plugin changed, by their sizes and times of change."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from nekro.plugins.discovery import SourceKind
from nekro.plugins.importing import Imported

__all__ = ["SourceWatch", "Stamps", "stamps_below"]

_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "venv", "tests", "docs"})

#: Path → time of change in ns, size, inode.
Stamps = dict[str, tuple[int, int, int]]


class SourceWatch:
    """Watches the Python files of one plugin."""

    def __init__(self, imported: Imported) -> None:
        """The present files count as those that were imported."""
        self._imported = imported
        self._loaded = self._previous = self._stamps()

    def has_changed(self) -> bool:
        """Check the files; True once for each change, when two checks in a row see the same.

        A change of several files, or an editor that writes in steps, is thus one change.
        """
        stamps, previous = self._stamps(), self._previous
        self._previous = stamps
        if stamps == self._loaded or stamps != previous:
            return False
        self._loaded = stamps
        return True

    def _stamps(self) -> Stamps:
        return _stamps_of(self._files())

    def _files(self) -> Iterator[str]:
        source = self._imported.source
        if source is None:
            return
        if source.kind is SourceKind.FILE:
            yield str(source.path)
            yield from self._imported_files()
            return
        yield from _python_files(source.path)

    def _imported_files(self) -> Iterator[str]:
        """Yield the files beside a plugin of one file that it has imported."""
        prefix = f"{self._imported.package}."
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name.startswith(prefix) and file:
                yield file


def stamps_below(paths: Iterable[Path]) -> Stamps:
    """Return the stamps of the Python files that are some paths, or in folders at these paths."""
    stamps: Stamps = {}
    for path in paths:
        stamps |= _stamps_of([str(path)] if path.is_file() else _python_files(path, follows_links=True))
    return stamps


def _stamps_of(files: Iterable[str]) -> Stamps:
    stamps: Stamps = {}
    for path in files:
        try:
            stat = os.stat(path)
        except OSError:
            continue
        stamps[path] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return stamps


def _python_files(path: Path, *, follows_links: bool = False) -> Iterator[str]:
    seen = set[str]()
    for folder, folders, files in os.walk(path, followlinks=follows_links):
        real = os.path.realpath(folder) if follows_links else folder
        if real in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        yield from (str(Path(folder, name)) for name in files if name.endswith(".py"))
