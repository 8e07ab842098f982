"""JSON schemas of methods, from the text of their signatures, and arguments in the form of a call."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from nekro.plugins.entries import MethodEntry
from nekro_agent.errors import ArgumentError

__all__ = ["arguments_of", "input_schema", "result_annotation"]

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
