"""Finds plugins in a folder.

A path that is named in ``NEKRO_PLUGINS__DIRS`` is either a plugin or a folder of plugins:

- ``weather.py`` — a single file with a module-level ``plugin``;
- ``weather/__init__.py`` — a package that exposes ``plugin`` there or in its ``plugin.py``;
- ``weather/plugin.py`` without ``__init__.py`` — the root file of a cloned repository;
- ``repository/weather/__init__.py`` — a package in a sub-folder, at most two levels down.

Names that start with ``_`` or ``.`` are skipped, and so are tests (``test_*.py``, ``*_test.py``,
``conftest.py``) and Python files that bind no ``plugin``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

__all__ = ["Source", "SourceKind", "discover"]

_MAX_DEPTH: Final = 2
_SKIPPED: Final = frozenset(
    {"conftest.py", "tests", "test", "docs", "examples", "node_modules", "venv", "dist", "build"}
)


class SourceKind(StrEnum):
    """How a plugin's code is laid out."""

    FILE = "file"
    PACKAGE = "package"
    #: A folder whose ``plugin.py`` is the plugin and which is not itself a package.
    ROOT_FILE = "root_file"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The location of one plugin's code, not imported yet."""

    name: str
    path: Path
    kind: SourceKind


def discover(path: Path) -> Iterator[Source]:
    """Yield the plugin at ``path``, or the plugins in that folder, sorted by file name."""
    single = _source(path)
    if single is not None:
        yield single
    elif path.is_dir():
        yield from _inside(path, depth=_MAX_DEPTH)


def _inside(folder: Path, *, depth: int) -> Iterator[Source]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.startswith(("_", ".")) or entry.name in _SKIPPED or _is_test(entry):
            continue
        source = _source(entry)
        if source is not None:
            yield source
        elif entry.is_dir() and depth > 0:
            yield from _inside(entry, depth=depth - 1)


def _is_test(path: Path) -> bool:
    """Whether pytest would collect a file; such a file binds ``plugin`` by importing it."""
    return path.suffix == ".py" and (path.stem.startswith("test_") or path.stem.endswith("_test"))


def _source(path: Path) -> Source | None:
    if path.is_file():
        if path.suffix == ".py" and _binds_plugin(path):
            return Source(name=path.stem, path=path, kind=SourceKind.FILE)
        return None
    init, root_file = path / "__init__.py", path / "plugin.py"
    if init.is_file() and (_binds_plugin(init) or (root_file.is_file() and _binds_plugin(root_file))):
        return Source(name=path.name, path=path, kind=SourceKind.PACKAGE)
    if not init.is_file() and root_file.is_file() and _binds_plugin(root_file):
        return Source(name=path.name, path=path, kind=SourceKind.ROOT_FILE)
    return None


def _binds_plugin(file: Path) -> bool:
    """Whether a file binds the name ``plugin``; True for a file that cannot be parsed, so it is reported."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "plugin" and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name) == "plugin" or alias.name == "*":
                    return True
    return False
