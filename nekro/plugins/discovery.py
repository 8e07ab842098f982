"""Finds plugins in a folder.

A path that is named in ``NEKRO_PLUGINS__DIRS`` is either a plugin or a folder of plugins:

- ``weather.py`` — a single file with a module-level ``plugin``;
- ``weather/__init__.py`` — a package that exposes ``plugin`` there or in its ``plugin.py``;
- ``weather/plugin.py`` without ``__init__.py`` — the root file of a cloned repository;
- ``repository/weather/__init__.py`` — a package in a sub-folder, at most two levels down.

Names that start with ``_`` or ``.`` are skipped, and so are tests (``test_*.py``, ``*_test.py``,
``conftest.py``) and Python files whose import binds no ``plugin``. A variable of a loop, a function or a
class of that name does not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

__all__ = ["PluginSource", "SourceKind", "discover"]

_MAX_DEPTH: Final = 2
_SKIPPED: Final = frozenset(
    {"conftest.py", "tests", "test", "docs", "examples", "node_modules", "venv", "dist", "build"}
)
_SCOPES: Final = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)
_MAIN_GUARDS: Final = frozenset({"__name__ == '__main__'", "'__main__' == __name__"})


class SourceKind(StrEnum):
    """How a plugin's code is laid out."""

    FILE = "file"
    PACKAGE = "package"
    #: A folder whose ``plugin.py`` is the plugin and which is not itself a package.
    ROOT_FILE = "root_file"


@dataclass(frozen=True, kw_only=True)
class PluginSource:
    """The location of one plugin's code, not imported yet."""

    name: str
    path: Path
    kind: SourceKind


def discover(path: Path) -> Iterator[PluginSource]:
    """Yield the plugin at ``path``, or the plugins in that folder, sorted by file name."""
    single = _source(path)
    if single is not None:
        yield single
    elif path.is_dir():
        yield from _inside(path, depth=_MAX_DEPTH)


def _inside(folder: Path, *, depth: int) -> Iterator[PluginSource]:
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


def _source(path: Path) -> PluginSource | None:
    if path.is_file():
        if path.suffix == ".py" and _binds_plugin(path):
            return PluginSource(name=path.stem, path=path, kind=SourceKind.FILE)
        return None
    init, root_file = path / "__init__.py", path / "plugin.py"
    if init.is_file() and (_binds_plugin(init) or (root_file.is_file() and _binds_plugin(root_file))):
        return PluginSource(name=path.name, path=path, kind=SourceKind.PACKAGE)
    if not init.is_file() and root_file.is_file() and _binds_plugin(root_file):
        return PluginSource(name=path.name, path=path, kind=SourceKind.ROOT_FILE)
    return None


def _binds_plugin(file: Path) -> bool:
    """Whether a file binds the name ``plugin``; True for a file that cannot be parsed, so it is reported."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
        return True
    return any(_binds(node, file) for node in _of_module(tree)) or _binds_in_a_function(tree)


def _of_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that an import executes in the module's own scope.

    Left out are functions, classes and comprehensions, loops over ``plugin``, whose body works on one item,
    and what runs only when the file is executed as a script.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _SCOPES) or _is_loop_over_plugin(child):
            continue
        if isinstance(child, ast.If) and _is_main_guard(child.test):
            for statement in child.orelse:
                yield statement
                yield from _of_module(statement)
            continue
        yield child
        yield from _of_module(child)


def _binds(node: ast.AST, file: Path) -> bool:
    if isinstance(node, ast.Assign):
        return any(_names_plugin(target) for target in node.targets)
    if isinstance(node, ast.AnnAssign | ast.NamedExpr):
        return node.value is not None and _names_plugin(node.target)
    if isinstance(node, ast.Import):
        return any((alias.asname or alias.name) == "plugin" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.asname or alias.name for alias in node.names}
        return "plugin" in names or ("*" in names and _is_own_module(node, file))
    return False


def _names_plugin(target: ast.AST) -> bool:
    return any(isinstance(name, ast.Name) and name.id == "plugin" for name in ast.walk(target))


def _is_loop_over_plugin(node: ast.AST) -> bool:
    return isinstance(node, ast.For | ast.AsyncFor) and _names_plugin(node.target)


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and ast.unparse(test).replace('"', "'") in _MAIN_GUARDS


def _is_own_module(node: ast.ImportFrom, file: Path) -> bool:
    """Whether ``from … import *`` reads a module beside the file, which may bind ``plugin``."""
    top = file.parent / (node.module or "").partition(".")[0]
    return node.level > 0 or top.is_dir() or top.with_suffix(".py").is_file()


def _binds_in_a_function(tree: ast.Module) -> bool:
    """Whether a function declares ``global plugin``, which it does to bind it."""
    return any(isinstance(node, ast.Global) and "plugin" in node.names for node in ast.walk(tree))
