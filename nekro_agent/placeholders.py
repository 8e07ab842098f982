"""Placeholders for names of the reference that do not exist here: importable, but raise at first use.

Published plugins import internals of the reference (workspaces, adapters, …) that have no counterpart
in this project. Their other methods should work nevertheless, so such an import returns a
:class:`Placeholder`. Using it raises ``PlaceholderUsedError``; importing it is recorded, and
``nekro plugins`` lists the plugin as degraded.

The same applies to ``tortoise`` (the reference reads its database with it) unless it is installed, and to
``nonebot``, because many plugins register its handlers during their import. During the import, calling a
placeholder returns another one, and as a decorator it returns the function unchanged, which is recorded
too; after that every use raises.

A name of a module ``exceptions``, or one that ends in ``Error``, ``Exception``, ``Failed`` or ``Finished``,
is a class of exceptions instead: it can be caught and raised, and nothing here raises it. A plugin loses
nothing by it, so it is not listed.

An import that the plugin itself guards with ``try … except ImportError`` fails as usual, so
that the plugin's own fallback runs; :func:`record_lost` lists what the plugin does without. Our own code
never gets placeholders.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import pkgutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final, NoReturn

from pydantic_core import core_schema

from nekro_agent.errors import NotFoundError, PlaceholderUsedError

__all__ = [
    "OWN_PACKAGES",
    "ROOTS",
    "Placeholder",
    "exception_class",
    "forget",
    "install",
    "is_replaced",
    "loading",
    "provide",
    "record_decorated",
    "record_lost",
    "record_missing",
    "used_by",
]

_ROOT: Final = "nekro_agent"
#: Top-level packages of the reference and its framework; plugins may import any name of them.
ROOTS: Final = frozenset({_ROOT, "nonebot"})
#: Installed with the reference; plugins may import any name of them if they are not installed here.
_LIBRARIES: Final = frozenset({"tortoise"})
#: Packages whose names plugins may import; the other modules of the SDK are private.
_REFERENCE_PACKAGES: Final = (
    "api",
    "adapters",
    "core",
    "matchers",
    "models",
    "schemas",
    "services",
    "tools",
)
#: Top-level packages of this project but for those of plugins.
OWN_PACKAGES: Final = (_ROOT, "nekro_client", "nekro", "broker_config", "storage", "workers")
_EXCEPTIONS: Final = "exceptions"
_EXCEPTION_SUFFIXES: Final = ("Error", "Exception", "Failed", "Finished")
_CATCHERS: Final = frozenset(
    {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"}
)
_IMPORT_FUNCTIONS: Final = frozenset({"__import__", "dynamic_import_pkg", "import_module"})
_IMPORT_OPCODES: Final = frozenset({dis.opmap["IMPORT_NAME"], dis.opmap["IMPORT_FROM"]})

#: Modules whose frames carry out an import of other code.
_IMPORTERS: Final = frozenset({__name__, f"{_ROOT}.packages.contexts"})

#: Whether a plugin is being imported.
_loading: ContextVar[bool] = ContextVar("nekro_placeholders_loading", default=False)

#: Placeholder modules in ``sys.modules``, by name.
_modules: dict[str, ModuleType] = {}
#: Importing module → full names of the placeholders that it received.
_used: defaultdict[str, set[str]] = defaultdict(set)
#: Names of the reference and its framework that work here, although their modules are placeholders.
_provided: dict[str, Any] = {"tortoise.exceptions.DoesNotExist": NotFoundError}
#: Importing module → those of them, and the classes of exceptions, that it received.
_received: defaultdict[str, set[str]] = defaultdict(set)
#: Module → what it does without, and why, by the name of what is missing.
_lost: defaultdict[str, dict[str, str]] = defaultdict(dict)


class Placeholder:
    """Replaces a name that does not exist here; any use except in annotations raises."""

    def __init__(self, full_name: str) -> None:
        self.__dict__["_full_name"] = full_name

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise PlaceholderUsedError(
            f"{self._full_name} does not exist in this system: the plugin was written for a part of "
            "Nekro Agent that has no counterpart here; its other methods work"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _loading.get():
            self._refuse()
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            record_decorated(self._full_name, args[0])
            return args[0]
        name = repr(args[0]) if args and isinstance(args[0], str) else "…"
        return Placeholder(f"{self._full_name}({name})")

    __setattr__ = __await__ = __aenter__ = __enter__ = __iter__ = __aiter__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if _loading.get() or name.endswith(_EXCEPTION_SUFFIXES):  # `except x.SomeError` runs after loading
            return _replacement(f"{self._full_name}.{name}")
        return self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<placeholder {self._full_name}>"

    def __or__(self, other: object) -> Any:
        return Any

    __ror__ = __getitem__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        refuse = self._refuse
        return (type("PlaceholderBase", (), {"__init__": lambda self, *args, **kwargs: refuse()}),)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.any_schema()


@functools.cache
def exception_class(full_name: str) -> type[Exception]:
    """Return the class of exceptions that code gets for a name that does not exist here."""
    module, _, name = full_name.rpartition(".")
    return type(name, (Exception,), {"__module__": module, "__doc__": f"{full_name} does not exist here."})


def provide(full_name: str, value: object) -> None:
    """Give plugins ``value`` for a name in a placeholder module; such a name is not listed."""
    _provided[full_name] = value


def _replacement(full_name: str) -> Any:
    """Return what code gets for a name that does not exist here."""
    if full_name in _provided:
        return _provided[full_name]
    return exception_class(full_name) if _is_exception(full_name) else Placeholder(full_name)


def _is_exception(full_name: str) -> bool:
    module, _, name = full_name.rpartition(".")
    return name.endswith(_EXCEPTION_SUFFIXES) or module.endswith(f".{_EXCEPTIONS}")


class _PlaceholderModule(ModuleType):
    """A module that does not exist here; each of its names is a placeholder."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        frame = _asking_frame()
        if frame is not None:
            _record(str(frame.f_globals.get("__name__", "")), full_name)
        return _replacement(full_name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in ``sys.meta_path``: provides modules of the reference that no other finder found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a placeholder module for plugin code, else None."""
        if fullname.partition(".")[0] not in ROOTS | _LIBRARIES or not _grant(fullname):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Create the module."""
        module = _modules[spec.name] = _PlaceholderModule(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because the module has no content."""


@functools.cache
def install() -> None:
    """Let plugin code import unknown names of the reference from now on; called by the loader."""
    sys.meta_path.append(_Finder())
    root = importlib.import_module(_ROOT)
    # Only these packages are walked: a walk imports each package that it finds.
    parts = [info.name for info in pkgutil.iter_modules(root.__path__) if info.name in _REFERENCE_PACKAGES]
    for part in parts:
        package = importlib.import_module(f"{_ROOT}.{part}")
        below = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for name in (package.__name__, *(info.name for info in below)):
            module = importlib.import_module(name)
            own = module.__dict__.get("__getattr__")
            module.__dict__["__getattr__"] = _missing_names(name, own)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Mark the block that imports a plugin."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)
        _forget_modules()


def used_by(module_prefix: str) -> list[str]:
    """Return the placeholders that a module and its submodules have imported, and what they do without."""
    names, received = (
        {name for module, found in record.items() if _is_in(module, module_prefix) for name in found}
        for record in (_used, _received)
    )
    # "nekro_agent.x" is implied by "nekro_agent.x.y", also if that works.
    deeper = names | received
    placeholders = (name for name in names if not any(other.startswith(name + ".") for other in deeper))
    lost = {
        text for module, found in _lost.items() if _is_in(module, module_prefix) for text in found.values()
    }
    return sorted({*placeholders, *lost})


def forget(module_prefix: str) -> None:
    """Drop the records of a module and its submodules, for a reload."""
    for record in (_used, _received, _lost):
        for module in [module for module in record if _is_in(module, module_prefix)]:
            del record[module]
    _guarded_lines.cache_clear()  # its files may have changed


def _is_in(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def record_decorated(decorator: str, function: FunctionType) -> None:
    """Record that a function was to be registered with something that does not exist here."""
    line = function.__code__.co_firstlineno
    _used[function.__module__].add(f"{decorator} has no effect on {function.__name__} (line {line})")


def record_missing(module: str, what: str) -> None:
    """Record that a plugin's module uses something that exists here, but not without a setting."""
    _used[module].add(what)


def record_lost(module: str, name: str, reason: str | None) -> None:
    """Record that a module does without something that it can use; None as the reason: it has it now."""
    if reason is not None:
        _lost[module][name] = f"without {name} ({reason})"
    elif module in _lost:
        _lost[module].pop(name, None)


def is_replaced(filename: str, line: int) -> bool:
    """Whether a failed import is no loss: the plugin does not guard it, or has something in its place."""
    return line not in _guarded_lines(filename, only_lost=True)


def _forget_modules() -> None:
    """Remove placeholder modules from ``sys.modules``, so that the next plugin imports its own."""
    while _modules:
        name, module = _modules.popitem()
        sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        vars(sys.modules.get(parent, module)).pop(child, None)


def _missing_names(module_name: str, own: Callable[[str], Any] | None) -> Callable[[str], Any]:
    def missing(name: str) -> Any:
        if own is not None:
            with contextlib.suppress(AttributeError):
                return own(name)
        full_name = f"{module_name}.{name}"
        if not (name.startswith("__") and name.endswith("__")) and _grant(full_name):
            return _replacement(full_name)
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")

    return missing


def _grant(full_name: str) -> bool:
    """Decide whether the importing code gets a placeholder, and record it."""
    frame = _asking_frame()
    if frame is None:
        return False
    importer = str(frame.f_globals.get("__name__", ""))
    if importer.partition(".")[0] in OWN_PACKAGES:
        return False
    # Attribute access (`core.thing`) is a use and not an import: an ordinary AttributeError is
    # precise, and hasattr() must return False.
    if frame.f_code.co_code[frame.f_lasti] not in _IMPORT_OPCODES:
        return False
    if frame.f_lineno in _guarded_lines(frame.f_code.co_filename):
        return False
    _record(importer, full_name)
    return True


def _record(importer: str, full_name: str) -> None:
    works = full_name in _provided or _is_exception(full_name)
    (_received if works else _used)[importer].add(full_name)


def _asking_frame() -> FrameType | None:
    """Return the nearest stack frame outside the import machinery and this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _IMPORTERS and not str(name).startswith("importlib"):
            return frame
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=256)
def _guarded_lines(filename: str, *, only_lost: bool = False) -> frozenset[int]:
    """Return the lines of imports inside a ``try`` whose handlers catch an ImportError.

    Args:
        only_lost: leave out those that such a handler replaces.
    """
    try:
        tree = ast.parse(Path(filename).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Try):
            continue
        inside = [inner for statement in node.body for inner in ast.walk(statement)]
        imports = [inner for inner in inside if isinstance(inner, ast.Import | ast.ImportFrom)]
        names = {(alias.asname or alias.name).partition(".")[0] for one in imports for alias in one.names}
        catching = [handler for handler in node.handlers if _catches_import_error(handler)]
        if catching and not (only_lost and any(_replaces(handler, names) for handler in catching)):
            for one in imports:
                lines.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    return frozenset(lines)


def _replaces(handler: ast.ExceptHandler, names: set[str]) -> bool:
    """Whether a handler imports something, or binds one of the names to another value than None and False."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Import | ast.ImportFrom):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _IMPORT_FUNCTIONS:
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in names:
            return True
        if isinstance(node, ast.Assign) and ast.unparse(node.value) not in ("None", "False"):
            targets = {ast.unparse(target) for target in node.targets}
            if targets & names:
                return True
    return False


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {node.id for node in types if isinstance(node, ast.Name)}
    return not names.isdisjoint(_CATCHERS)
