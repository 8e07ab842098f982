"""Methods for clients: JSON schemas from their signatures, and the guide for those who write code.

Arguments of tools are turned into the form of a call.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry
from nekro_agent.errors import ArgumentError

__all__ = [
    "arguments_of",
    "bounded_catalogue",
    "code_guide",
    "find_methods",
    "input_schema",
    "result_annotation",
]


_SIMPLE: Final[dict[str, dict[str, Any]]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "None": {"type": "null"},
    "NoneType": {"type": "null"},
    "list": {"type": "array"},
    "List": {"type": "array"},
    "tuple": {"type": "array"},
    "Tuple": {"type": "array"},
    "set": {"type": "array"},
    "Set": {"type": "array"},
    "frozenset": {"type": "array"},
    "Sequence": {"type": "array"},
    "Iterable": {"type": "array"},
    "dict": {"type": "object"},
    "Dict": {"type": "object"},
    "Mapping": {"type": "object"},
}

_ARRAYS: Final = frozenset(name for name, schema in _SIMPLE.items() if schema == {"type": "array"})

_OBJECTS: Final = frozenset(name for name, schema in _SIMPLE.items() if schema == {"type": "object"})
#: For a method whose signature cannot be read: its worker checks the arguments.
_ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": True}


@lru_cache(maxsize=4096)
def input_schema(entry: MethodEntry) -> dict[str, Any]:
    """Return the schema of a method's arguments; shared, so it must not be changed.

    A type that the text does not define, such as a class of the plugin, is left open. ``*args`` is an array
    with the name of the parameter.
    """
    function = _parsed(entry.signature)
    if function is None:
        return _ANY_ARGUMENTS
    args = function.args
    properties: dict[str, Any] = {}
    required: list[str] = []
    positional = [*args.posonlyargs, *args.args]
    without = len(positional) - len(args.defaults)
    for position, one in enumerate(positional):
        default = args.defaults[position - without] if position >= without else None
        properties[one.arg] = _with_default(_schema(one.annotation), default)
        if default is None:
            required.append(one.arg)
    if args.vararg is not None:
        items = _schema(args.vararg.annotation)
        properties[args.vararg.arg] = {"type": "array", **({"items": items} if items else {})}
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        properties[one.arg] = _with_default(_schema(one.annotation), default)
        if default is None:
            required.append(one.arg)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    schema["additionalProperties"] = args.kwarg is not None
    return schema


def result_annotation(entry: MethodEntry) -> str | None:
    """Return the text of the type that a method says it returns; None if it says none."""
    function = _parsed(entry.signature)
    return None if function is None or function.returns is None else ast.unparse(function.returns)


def arguments_of(entry: MethodEntry, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of a call, from an object that fits ``input_schema``.

    Raises:
        ArgumentError: the value for ``*args`` is not a list, or an argument before it is missing.
    """
    function = _parsed(entry.signature)
    named = dict(given)
    if function is None:
        return (), named
    args = function.args
    extra = _extra(args.vararg, named)
    names = [one.arg for one in args.posonlyargs] + ([one.arg for one in args.args] if extra else [])
    positional: list[Any] = []
    for name in names:
        if name not in named:
            if extra or any(later in named for later in names[names.index(name) :]):
                raise ArgumentError(f"{entry.name}{entry.signature}: missing a required argument: {name!r}")
            break
        positional.append(named.pop(name))
    return (*positional, *extra), named


def _extra(vararg: ast.arg | None, named: dict[str, Any]) -> list[Any]:
    if vararg is None:
        return []
    extra = named.pop(vararg.arg, [])
    if not isinstance(extra, list):
        raise ArgumentError(f"{vararg.arg} must be an array, not {extra!r:.100}")
    return extra


@lru_cache(maxsize=4096)
def _parsed(signature: str) -> ast.FunctionDef | None:
    try:
        module = ast.parse(f"def f{signature}: ...")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = module.body[0] if len(module.body) == 1 else None
    return found if isinstance(found, ast.FunctionDef) else None


def _with_default(schema: dict[str, Any], default: ast.expr | None) -> dict[str, Any]:
    if isinstance(default, ast.Constant) and isinstance(default.value, (str, int, float, bool)):
        return {**schema, "default": default.value}
    return schema


def _schema(annotation: ast.expr | None) -> dict[str, Any]:
    """Return the schema of an annotation; {} for one that says nothing."""
    if isinstance(annotation, ast.Constant):
        return _of_constant(annotation.value)
    if isinstance(annotation, ast.Attribute):
        return _SIMPLE.get(annotation.attr, {})
    if isinstance(annotation, ast.Name):
        return _SIMPLE.get(annotation.id, {})
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _any_of([_schema(annotation.left), _schema(annotation.right)])
    if isinstance(annotation, ast.Subscript):
        return _of_generic(_name(annotation.value), annotation.slice)
    return {}


def _of_constant(value: object) -> dict[str, Any]:
    if value is None:
        return {"type": "null"}
    if not isinstance(value, str):
        return {}
    try:
        return _schema(ast.parse(value, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return {}


def _of_generic(name: str, inside: ast.expr) -> dict[str, Any]:
    parts = list(inside.elts) if isinstance(inside, ast.Tuple) else [inside]
    if name == "Optional":
        return _any_of([_schema(parts[0]), {"type": "null"}])
    if name == "Union":
        return _any_of([_schema(part) for part in parts])
    if name == "Annotated":
        return _schema(parts[0])
    if name == "Literal":
        values = [part.value for part in parts if isinstance(part, ast.Constant)]
        is_plain = all(value is None or isinstance(value, (str, int, float, bool)) for value in values)
        return {"enum": values} if len(values) == len(parts) and is_plain else {}
    if name in ("tuple", "Tuple"):
        is_open = len(parts) == 2 and isinstance(parts[1], ast.Constant) and parts[1].value is Ellipsis
        return {"type": "array", "items": _schema(parts[0])} if is_open else {"type": "array"}
    if name in _ARRAYS:
        return {"type": "array", "items": _schema(parts[0])}
    if name in _OBJECTS:
        return (
            {"type": "object", "additionalProperties": _schema(parts[1])}
            if len(parts) == 2
            else _SIMPLE[name]
        )
    return {}


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    flat = [one for schema in schemas for one in schema.get("anyOf", [schema])]
    return {} if {} in flat else {"anyOf": flat}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


_MOST_FOUND: Final = 20
#: Characters of the catalogue in full; a longer one is a list of names with one line each.
_FULL_CHARS: Final = 20_000

_LINE_CHARS: Final = 120
#: Characters of the catalogue in the description of a tool, which every request of a host's model carries.
_TOOL_CHARS: Final = 6_000

_GUIDE: Final = """\
Write one Python program and run it with the tool `run_code`.

- Every method below is a function; call it without an import and without `await`, with plain values.
- A call that fails raises an exception. A method of type `agent` or `multimodal_agent` ends the program.
- Print what you need to know: you see only what the program prints, and the report of its calls.
- There is no network. Files are below /app/uploads (files of the chat) and in the working directory, which is
  /app/shared (kept between runs).
- Prefer one program with loops and conditions to many small ones.
"""


def code_guide(registry: Registry, *, plugin: str | None, task: str | None) -> str:
    """Return the text of the prompt `write_code`.

    Args:
        plugin: only the methods of this plugin, in full; None means all, within a budget.
        task: what the program is to do; None adds nothing.
    """
    entries = [entry for entry in registry.enabled() if plugin in (None, entry.plugin_key) and entry.doc]
    full = _in_full(registry, entries)
    if plugin is None and len(full) > _FULL_CHARS:
        listed = f"{_in_brief(registry, entries)}\n\n`find_methods` shows signatures and descriptions."
    else:
        listed = full
    parts = [_GUIDE, "# Methods", listed or "(there are none)", *(["# Task", task] if task else [])]
    return "\n\n".join(parts)


def bounded_catalogue(registry: Registry) -> str:
    """Return what fits into a tool's description: methods in full, as one line each, or only plugins."""
    entries = [entry for entry in registry.enabled() if entry.doc]
    for listed in (_in_full, _in_brief, _by_plugin):
        text = listed(registry, entries)
        if len(text) <= _TOOL_CHARS:
            break
    else:
        text = f"{text[: _TOOL_CHARS - 1]}…"
    return text or "(there are none)"


def find_methods(registry: Registry, words: str) -> str:
    """Return signatures and descriptions of the methods that contain all words; all names without words."""
    entries = registry.enabled()
    wanted = frozenset(words.casefold().split())
    if not wanted:
        return _in_brief(registry, entries)
    found = [entry for entry in entries if _has_all(_searched(entry), wanted)]
    if not found:
        return "No method contains all these words. Try fewer words, or none for the names of all methods."
    text = _in_full(registry, found[:_MOST_FOUND])
    more = len(found) - _MOST_FOUND
    return f"{text}\n\n({more} more; add words)" if more > 0 else text


def _has_all(text: str, words: Iterable[str]) -> bool:
    return all(word in text for word in words)


def _searched(entry: MethodEntry) -> str:
    return f"{entry.task} {entry.label} {entry.doc or ''}".casefold()


def _in_full(registry: Registry, entries: Iterable[MethodEntry]) -> str:
    return "\n\n".join(
        f"{_method_name(registry, entry)}{entry.signature}  # {entry.type.value}, of {entry.plugin_key}"
        f"{', a person must approve each call' if entry.requires_approval else ''}\n"
        f"{entry.doc or ''}".rstrip()
        for entry in entries
    )


def _in_brief(registry: Registry, entries: Iterable[MethodEntry]) -> str:
    plugins: dict[str, list[str]] = {}
    for entry in entries:
        line = (entry.doc or "").strip().partition("\n")[0]
        short = line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…"
        plugins.setdefault(entry.plugin_key, []).append(
            f"- {_method_name(registry, entry)}: {short}".rstrip(": ")
        )
    return "\n\n".join("\n".join([f"## {key}", *lines]) for key, lines in plugins.items())


def _by_plugin(registry: Registry, entries: Iterable[MethodEntry]) -> str:
    counts = Counter(entry.plugin_key for entry in entries)
    return "\n".join(
        f"- {key}: {count} methods; find_methods {key!r} lists them" for key, count in counts.items()
    )


def _method_name(registry: Registry, entry: MethodEntry) -> str:
    """Return a method's name in code."""
    return next(iter(registry.bare_names(entry)), entry.task)
