"""Import contexts: what ``import`` means in the code of a plugin and of packages installed for plugins.

Top-level packages of this project have common names (``storage``, ``workers``, …). A plugin, a file beside it
or a package that it installs may have a module of such a name, and two plugins may both have a ``utils.py``.

Each module of a plugin therefore has a ``__builtins__`` with an ``__import__`` of its plugin. A context
belongs to code, not to a thread or to a point in time: it also applies to imports inside functions.

- A plugin's modules are loaded below a package of its own, ``nekro_plugins.<name>``. Absolute names of files
  beside the plugin lead there. Entries of ``sys.path`` that a plugin adds for its own folder are moved to
  its context.
- The names of our packages other than ``nekro_agent`` lead to the plugin's own modules, else to installed
  modules of that name, loaded below ``nekro_installed``, and never to ours.
- Our packages are found in our own folder only, whatever ``sys.path`` contains.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from nekro_agent.placeholders import OWN_PACKAGES, ROOTS

__all__ = [
    "NAMESPACE",
    "FailedImport",
    "PluginImports",
    "add_installed",
    "executed",
    "install",
    "installed_name",
    "is_importable",
    "make_package",
]

#: Parent of the plugins' packages.
NAMESPACE: Final = "nekro_plugins"
#: Parent of installed modules that are named like our packages.
_INSTALLED: Final = "nekro_installed"
_OUR_NAMES: Final = frozenset({*OWN_PACKAGES, "plugin_pkgs"})
_HIDDEN: Final = _OUR_NAMES - ROOTS
_OUR_FOLDER: Final = str(Path(__file__).parents[2])

#: Package of a plugin → its context.
_plugins: dict[str, PluginImports] = {}
#: Folders, with a trailing separator, and top-level names of packages that are installed for plugins.
_installed_folders: set[str] = set()
_installed_names: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class FailedImport:
    """One failed import of a plugin."""

    #: ``weather.py, line 3: No module named 'x'``.
    text: str
    #: What the code asked for: a module, or a name with its module.
    name: str
    file: str
    line: int
    #: The module that does not exist; None if another reason made the import fail.
    missing: str | None = None


class _Context:
    """Decides what absolute names mean in some modules."""

    def __init__(self) -> None:
        #: ``__builtins__`` of those modules.
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        self._importlib = _Importlib(self)

    def resolve(self, top: str) -> str | None:
        """Return the full name that loads a top-level name; None: that name itself."""
        return f"{_INSTALLED}.{top}" if top in _HIDDEN else None

    def import_module(self, name: str, package: str | None = None) -> ModuleType:
        """Import a module like ``importlib.import_module``, as code of this context."""
        if name.startswith("."):
            return importlib.import_module(name, package)
        top, dot, rest = name.partition(".")
        actual = self.resolve(top)
        if actual is None:
            return importlib.import_module(name)
        return _load(f"{actual}{dot}{rest}", actual, top)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        top, dot, rest = name.partition(".")
        actual = self.resolve(top) if level == 0 else None
        if actual is not None:
            module = _load(f"{actual}{dot}{rest}", actual, top)
            if not fromlist:
                return sys.modules[actual]
            name = module.__name__
        module = builtins.__import__(name, globals, locals, fromlist or (), level)
        return self._importlib if module is importlib else module


class _Importlib(ModuleType):
    """``importlib`` as code of a context sees it."""

    def __init__(self, context: _Context) -> None:
        super().__init__("importlib")
        self.import_module = context.import_module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib, name)


class PluginImports(_Context):
    """The context of one plugin; its modules are loaded below ``package``."""

    def __init__(self, package: str, folder: Path, *, is_package: bool, reads_bytecode: bool = True) -> None:
        """Create the context and make ``package`` importable below ``nekro_plugins``.

        Args:
            package: ``nekro_plugins.<name>``.
            folder: the folder of the plugin's code.
            is_package: whether the folder belongs to the plugin alone, so that its name means the plugin.
            reads_bytecode: False compiles the files: a changed file may have the size and the second of the
                file that a ``.pyc`` was made of.
        """
        super().__init__()
        self.package = package
        #: Imports that failed while the plugin was loaded, in order; None afterwards.
        self.failures: list[FailedImport] | None = []
        self.reads_bytecode = reads_bytecode
        self._folder = os.path.realpath(folder)
        self._own_name = folder.name if is_package else None
        self._paths_before = frozenset(sys.path)
        self._first: list[str] = []
        self._last: list[str] = [self._folder]
        self._extra_packages: dict[str, str] = {}
        self._known: dict[str, str | None] = {}
        _plugins[package] = self

    def forget(self) -> None:
        """Drop the plugin's modules, so that a later import executes its files again."""
        _plugins.pop(self.package, None)
        for name in [n for n in sys.modules if n == self.package or n.startswith(f"{self.package}.")]:
            del sys.modules[name]

    def resolve(self, top: str) -> str | None:
        """See the base class; the decision about a module that was found is kept."""
        if top in self._known:
            return self._known[top]
        if top in sys.stdlib_module_names or top in ROOTS:
            return None
        self.adopt_paths()
        found = self._find(self._first, top)
        if found is None and top not in _HIDDEN and is_importable(top):
            self._known[top] = None
            return None
        if found is None:
            found = self.package if top == self._own_name else self._find(self._last, top)
        if found is None:
            return super().resolve(top)
        self._known[top] = found
        return found

    def loaded(self) -> None:
        """Note that the plugin has been imported."""
        self.adopt_paths()
        self.failures = None

    def adopt_paths(self) -> None:
        """Move entries of ``sys.path`` that the plugin added for its own folder to this context."""
        for entry in [e for e in sys.path if e not in self._paths_before and self._is_own(e)]:
            index = sys.path.index(entry)
            is_first = not self._paths_before.isdisjoint(sys.path[index + 1 :])
            sys.path.remove(entry)
            paths = self._first if is_first else self._last
            if os.path.realpath(entry) not in paths:
                paths.insert(0, os.path.realpath(entry))

    def _is_own(self, entry: object) -> bool:
        if not isinstance(entry, str) or not entry:
            return False
        path = os.path.realpath(entry)
        return f"{path}/".startswith(f"{self._folder}/") or path == os.path.dirname(self._folder)

    def _find(self, paths: Sequence[str], top: str) -> str | None:
        for path in paths:
            if PathFinder.find_spec(top, [path]) is not None:
                return f"{self._package_of(path)}.{top}"
        return None

    def _package_of(self, path: str) -> str:
        """Return the package whose modules are the files of a folder."""
        if path == self._folder:
            return self.package
        if path not in self._extra_packages:
            name = f"{self.package}.__path_{len(self._extra_packages)}__"
            make_package(name, [path])
            self._extra_packages[path] = name
        return self._extra_packages[path]

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level > 1 and str((globals or {}).get("__package__")).count(".") < level:
            # Above the plugin's package there are other plugins.
            raise ImportError("attempted relative import beyond top-level package")
        try:
            module = super()._import(name, globals, locals, fromlist, level)
        except ImportError as exc:
            missing = exc.name if isinstance(exc, ModuleNotFoundError) else None
            self._note(str(exc), missing or name or "its own modules", missing)
            raise
        for wanted in fromlist or () if self.failures is not None else ():
            if wanted != "*" and not hasattr(module, wanted):
                self._note(f"cannot import name {wanted!r} from {name!r}", f"{name}.{wanted}".lstrip("."))
        return module

    def _note(self, error: str, name: str, missing: str | None = None) -> None:
        if self.failures is None:
            return
        frame = sys._getframe(2)
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = f"{os.path.basename(file)}, line {line}: {error}"
        self.failures.append(FailedImport(text=text, name=name, file=file, line=line, missing=missing))


class _SourceLoader(SourceFileLoader):
    """Executes a file in a context."""

    def __init__(self, fullname: str, path: str, context: _Context) -> None:
        super().__init__(fullname, path)
        self._context = context

    def get_code(self, fullname: str) -> Any:
        """Compile the file, from its bytecode where the context allows that."""
        if getattr(self._context, "reads_bytecode", True):
            return super().get_code(fullname)
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        """Compile text; each fault of the text is a SyntaxError that names the file.

        Python raises ValueError for null bytes before 3.11.4, and others for expressions nested too deeply.
        """
        try:
            return super().source_to_code(data, path, _optimize=_optimize)
        except (ValueError, RecursionError, MemoryError) as exc:
            fault = f"{exc}" or "it is too complex to parse"
            raise SyntaxError(fault, (os.fsdecode(path), None, None, None)) from exc

    def exec_module(self, module: ModuleType) -> None:
        """Execute the file with the context's ``__builtins__``."""
        module.__dict__["__builtins__"] = self._context.builtins
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """First in ``sys.meta_path``: finds our packages in our folder, and other code in its context."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is ours or belongs to a context; None leaves it to Python."""
        top, _, rest = fullname.partition(".")
        if fullname in _OUR_NAMES:
            return PathFinder.find_spec(fullname, [_OUR_FOLDER])
        if top == NAMESPACE:
            plugin = _plugins.get(f"{top}.{rest.partition('.')[0]}")
            return _in_context(PathFinder.find_spec(fullname, path), plugin) if plugin is not None else None
        if top == _INSTALLED:
            return _in_context(_installed_spec(fullname, path), _packages())
        if top in _installed_names:
            return _in_context(PathFinder.find_spec(fullname, path), _packages())
        if not _installed_folders or top in _OUR_NAMES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        is_installed = spec is not None and (spec.origin or "").startswith(tuple(_installed_folders))
        return _in_context(spec, _packages()) if is_installed else None


@functools.cache
def install() -> None:
    """Apply contexts to imports from now on."""
    sys.meta_path.insert(0, _Finder())
    for name in (NAMESPACE, _INSTALLED):
        make_package(name, [])


def make_package(name: str, paths: list[str]) -> ModuleType:
    """Add a package without code to ``sys.modules``; its modules are found in ``paths``."""
    package = ModuleType(name)
    package.__path__ = paths
    sys.modules[name] = package
    return package


def add_installed(*, folder: Path | None = None, name: str | None = None) -> None:
    """Load a folder's modules, or a top-level module, in the context of packages installed for plugins."""
    install()
    if folder is not None:
        _installed_folders.add(f"{folder}{os.sep}")
    if name is not None and name not in _OUR_NAMES:
        _installed_names.add(name)


def installed_name(name: str) -> str:
    """Return the name that imports an installed module: another one if ours has its name."""
    install()
    top, dot, rest = name.partition(".")
    return f"{_packages().resolve(top) or top}{dot}{rest}"


def executed(name: str, file: Path, context: PluginImports, *, package_dir: Path | None = None) -> ModuleType:
    """Execute a plugin's file as a module of its context, and return the module.

    Args:
        package_dir: the folder of the module's submodules; None if it is not a package.
    """
    loader = _SourceLoader(name, str(file), context)
    spec = ModuleSpec(name, loader, origin=str(file), is_package=package_dir is not None)
    spec.has_location = True
    if package_dir is not None:
        spec.submodule_search_locations = [str(package_dir)]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


@functools.cache
def _packages() -> _Context:
    """Return the context of packages installed for plugins."""
    return _Context()


def _in_context(spec: ModuleSpec | None, context: _Context) -> ModuleSpec | None:
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = _SourceLoader(spec.loader.name, spec.loader.path, context)
    return spec


def _installed_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module below ``nekro_installed``; a folder without code is not a package of our name."""
    if fullname.count(".") > 1:
        return PathFinder.find_spec(fullname, path)
    others = [entry for entry in sys.path if entry and os.path.realpath(entry) != _OUR_FOLDER]
    spec = PathFinder.find_spec(fullname, others)
    return None if spec is None or spec.origin is None else spec


def _load(full_name: str, actual: str, top: str) -> ModuleType:
    """Import a module whose top-level name has another meaning; errors name it as the code does."""
    try:
        return importlib.import_module(full_name)
    except ModuleNotFoundError as exc:
        missing = exc.name or ""
        if missing != actual and not missing.startswith(f"{actual}."):
            raise
        name = top + missing.removeprefix(actual)
        raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None


def is_importable(top: str) -> bool:
    """Whether Python finds a module."""
    if top in sys.modules:
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False
