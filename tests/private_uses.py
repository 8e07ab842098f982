"""Finds the product's uses of Celery's and kombu's private API: by its source, and by its classes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.test_layers import PACKAGES, ROOT

LIBRARIES = ("billiard", "celery", "kombu", "vine")
#: Modules whose names users of the libraries import, according to their documentation.
DOCUMENTED = {"celery", "celery.exceptions", "celery.signals", "kombu", "kombu.connection"}
DOCUMENTED |= {"kombu.entity", "kombu.exceptions"}
#: Base classes that are documented as made for subclasses.
DOCUMENTED_BASES = {"celery.bootsteps", "celery.exceptions"}
#: Where objects of the libraries are used without an import of theirs.
OUR_PLACES = ("nekro.broker.celery.", "nekro.broker.delivery.", "workers.pools.")
NAMED = re.compile(r"(celery|kombu)(\.\w+)+(:\w+)?")
FOREIGN_NAME = re.compile(r"(?:self\.|cls\.|def |class )(_[A-Za-z]\w*)")


@dataclass
class Found:
    """What a module uses; the dictionaries are by class, `overrides` further by name."""

    imports: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    overrides: dict[str, dict[str, str]] = field(default_factory=dict)
    inherits: dict[str, set[str]] = field(default_factory=dict)


def find() -> dict[str, Found]:
    """Return the uses of each module that has any."""
    found = {}
    for module, tree in modules():
        here = Found(imported(tree), private(module, tree))
        for name, replaced, names in subclasses(module, tree):
            here.overrides[name] = replaced
            here.inherits[name] = names - set(replaced)
        if here != Found():
            found[module] = here
    return found


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Each module of the product that may use a library, with its tree."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            text = path.read_text("utf-8")
            if module.startswith(OUR_PLACES) or any(map(text.__contains__, LIBRARIES)):
                yield module, ast.parse(text)


def imported(tree: ast.Module) -> set[str]:
    """Undocumented names of the libraries that a module imports, or names in a string, as MODULE[:NAME]."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and is_library(node.module):
            found |= {f"{node.module}:{a.name}" for a in node.names if node.module not in DOCUMENTED}
            found |= {f"{node.module}:{a.name}" for a in node.names if a.name.startswith("_")}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if is_library(a.name) and a.name not in DOCUMENTED}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            found |= {node.value} - DOCUMENTED
    return found


def is_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in LIBRARIES


def classes(module: str, tree: ast.Module) -> Iterator[tuple[type, ast.ClassDef, list[type]]]:
    """Each class of a module that derives from a class of a library, and those base classes."""
    if not any(isinstance(node, ast.ClassDef) for node in tree.body):
        return
    loaded = importlib.import_module(module)
    for node in tree.body:
        cls = getattr(loaded, node.name) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and isinstance(cls, type):
            bases = [base for base in cls.__mro__ if is_library(base.__module__)]
            if bases and bases[0].__module__ not in DOCUMENTED_BASES:
                yield cls, node, bases


def overridden(cls: type, bases: list[type]) -> dict[str, str]:
    """What a class replaces of its library's class, each with the form that it has there."""
    names = [name for name in vars(cls) if not name.startswith("__") or name == "__init__"]
    return {name: form(inspect.getattr_static(bases[0], name)) for name in names if hasattr(bases[0], name)}


def form(member: Any) -> str:
    """A method's parameters, those with a default marked by `=`; "attribute" for anything else."""
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if not inspect.isfunction(member):
        return "attribute"
    shown = []
    for one in inspect.signature(member).parameters.values():
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(f"{stars}{one.name}{'' if one.default is one.empty else '='}")
    return f"({', '.join(shown)})"


def inherited(cls: type, node: ast.ClassDef, bases: list[type]) -> set[str]:
    """Names of the library's class that a class uses through ``self``, and that it does not define itself."""
    used = {attribute.attr for attribute in ast.walk(node) if is_of(attribute, "self")}
    ours = {name for base in cls.__mro__ if base not in bases for name in vars(base)}
    return {name for name in used - ours if is_known(name, bases) and not name.startswith("__")}


def is_of(node: ast.AST, owner: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner


def is_known(name: str, bases: list[type]) -> bool:
    """Whether a library's class has an attribute, or assigns it."""
    mangled = re.sub(r"^_[A-Z][a-z]+__", "__", name)
    assigned = re.compile(rf"\bself\.{mangled}\b")
    return hasattr(bases[0], name) or any(assigned.search(source(base)) for base in bases)


@functools.cache
def source(cls: type) -> str:
    return inspect.getsource(cls)


@functools.cache
def foreign_names() -> frozenset[str]:
    """Names with an underscore that the libraries define anywhere."""
    found: set[str] = set()
    for library in LIBRARIES:
        (folder,) = importlib.import_module(library).__path__
        for path in Path(folder).rglob("*.py"):
            found.update(FOREIGN_NAME.findall(path.read_text("utf-8")))
    return frozenset(found)


def private(module: str, tree: ast.Module) -> set[str]:
    """Names with an underscore that a module uses of other objects, and that the libraries define."""
    if not (any(map(is_library, all_imports(tree))) or module.startswith(OUR_PLACES)):
        return set()
    others = {alias.asname or alias.name for node in ast.walk(tree) for alias in stdlib_aliases(node)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner not in {"self", "cls"} | others:
                found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            found |= {one.value for one in node.args[1:2] if isinstance(one, ast.Constant)}
    private_names = {name for name in found if name.startswith("_") and not name.startswith("__")}
    return (private_names & foreign_names()) - defined_here(module, tree)


def all_imports(tree: ast.Module) -> set[str]:
    nodes = list(ast.walk(tree))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return found | {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}


def stdlib_aliases(node: ast.AST) -> list[ast.alias]:
    if isinstance(node, ast.Import):
        return [one for one in node.names if one.name.partition(".")[0] in sys.stdlib_module_names]
    return []


def defined_here(module: str, tree: ast.Module) -> set[str]:
    """Names that a module defines and that no library's class has, of which a class in it derives."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and is_of(node, "self") and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found - {name for _, _, names in subclasses(module, tree) for name in names}


def subclasses(module: str, tree: ast.Module) -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Each class that derives from a library's: its name, what it overrides, what it uses of its base."""
    if not any(map(is_library, all_imports(tree))):
        return
    for cls, node, bases in classes(module, tree):
        replaced = overridden(cls, bases)
        yield cls.__name__, replaced, set(replaced) | inherited(cls, node, bases)


def resolve(name: str) -> ModuleType | Any:
    """The object that MODULE[:NAME] names."""
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    if not attribute:
        return loaded
    return getattr(loaded, attribute, None) or importlib.import_module(f"{module}.{attribute}")


if __name__ == "__main__":
    for module, uses in find().items():
        if module in sys.argv[1:]:
            print(module, *(f"  {name}: {value}" for name, value in vars(uses).items()), sep="\n")
