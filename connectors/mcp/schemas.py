"""JSON schemas of tools as Python signatures: names, annotations and shapes.

A schema is data of a server: it is read to a bounded depth and length, and never evaluated.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from connectors.mcp.texts import line

__all__ = ["CONTEXT", "Argument", "annotation", "arguments_of", "identifier", "shape", "signature_of"]

#: Name of the first parameter, which receives the context; no argument has it.
CONTEXT: Final = "_ctx"
_MOST_ARGUMENTS: Final = 100
_MOST_DEPTH: Final = 5
_MOST_CHARS: Final = 160
_MOST_CHOICES: Final = 16
_MOST_CHOICE_CHARS: Final = 40
_SCALARS: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument of a tool."""

    #: Python identifier; differs from ``key`` where the server's name is none.
    name: str
    #: The server's name.
    key: str
    annotation: str
    is_required: bool
    #: The schema's default; ``...`` without one.
    default: Any
    #: Whether None is a value of its own, and not the same as leaving the argument out.
    is_nullable: bool
    description: str
    #: The schema, for the shape of nested objects.
    schema: Any


def identifier(name: str, taken: Iterable[str] = ()) -> str:
    """Return a name as a Python identifier, with a number if that is taken."""
    base = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:60] or "tool"
    if base[0].isdigit():
        base = f"_{base}"
    if keyword.iskeyword(base) or base in ("None", "True", "False", CONTEXT):
        base = f"{base}_"
    used, found, number = set(taken), base, 2
    while found in used:
        found, number = f"{base}_{number}", number + 1
    return found


def arguments_of(schema: Mapping[str, Any]) -> tuple[list[Argument], bool]:
    """Return the arguments of an ``inputSchema``, required ones first, and whether others are accepted."""
    properties = schema.get("properties")
    is_open = bool(schema.get("additionalProperties")) or (
        not isinstance(properties, Mapping) and schema.get("additionalProperties") is not False
    )
    if not isinstance(properties, Mapping):
        return [], is_open
    listed = schema.get("required")
    required = {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()
    found: list[Argument] = []
    for key, one in list(properties.items())[:_MOST_ARGUMENTS]:
        resolved = _resolved(one, schema)
        found.append(
            Argument(
                name=identifier(str(key), (argument.name for argument in found)),
                key=str(key),
                annotation=annotation(one, schema),
                is_required=key in required,
                default=resolved.get("default", ...),
                is_nullable="None" in annotation(one, schema).split(" | ")
                or annotation(one, schema) == "Any",
                description=str(one.get("description") or resolved.get("description") or "")
                if isinstance(one, Mapping)
                else "",
                schema=one,
            )
        )
    return sorted(found, key=lambda argument: not argument.is_required), is_open


def signature_of(arguments: Iterable[Argument], *, is_open: bool, returns: str) -> inspect.Signature:
    """Return a signature whose first parameter is the context; optional arguments are passed by name."""
    parameters = [inspect.Parameter(CONTEXT, inspect.Parameter.POSITIONAL_ONLY)]
    for argument in arguments:
        is_needed = argument.is_required
        parameters.append(
            inspect.Parameter(
                argument.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD if is_needed else inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if is_needed else _default(argument.default),
                annotation=argument.annotation,
            )
        )
    if is_open:
        name = identifier("more", (parameter.name for parameter in parameters))
        parameters.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD, annotation="Any"))
    return inspect.Signature(parameters, return_annotation=returns)


def annotation(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return the Python type of a schema, for people and models."""
    text = _annotation(schema, root, depth)
    return text if len(text) <= _MOST_CHARS else "Any"


def shape(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return the type of a schema with the fields of objects: ``list[{'name': str, 'size'?: int}]``."""
    resolved = _resolved(schema, root)
    if depth > _MOST_DEPTH:
        return "Any"
    if resolved.get("type") == "array":
        return f"list[{shape(resolved.get('items', {}), root, depth + 1)}]"
    properties = resolved.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return annotation(schema, root)
    required = resolved.get("required")
    needed = required if isinstance(required, list) else []
    parts = [
        f"{_choice(str(key))}{'' if key in needed else '?'}: {shape(one, root, depth + 1)}"
        for key, one in list(properties.items())[:_MOST_ARGUMENTS]
    ]
    return f"{{{', '.join(parts)}}}"


def _annotation(schema: Any, root: Mapping[str, Any], depth: int) -> str:
    if depth > _MOST_DEPTH or not isinstance(schema, Mapping):
        return "Any"
    schema = _resolved(schema, root)
    if "const" in schema:
        return f"Literal[{_choice(schema['const'])}]"
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        more = ["..."] if len(choices) > _MOST_CHOICES else []
        return f"Literal[{', '.join([*map(_choice, choices[:_MOST_CHOICES]), *more])}]"
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return _union(annotation(one, root, depth + 1) for one in schema[key])
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) == 1:
        return annotation(parts[0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        return _union(annotation({**schema, "type": one}, root, depth + 1) for one in kind)
    if kind == "array":
        items = schema.get("items")
        return f"list[{annotation(items, root, depth + 1)}]" if isinstance(items, Mapping) else "list"
    if kind == "object" or "properties" in schema:
        values = schema.get("additionalProperties")
        if isinstance(values, Mapping) and values and not schema.get("properties"):
            return f"dict[str, {annotation(values, root, depth + 1)}]"
        return "dict"
    return _SCALARS.get(str(kind), "Any")


def _union(parts: Iterable[str]) -> str:
    unique = list(dict.fromkeys(part for one in parts for part in one.split(" | ")))
    return "Any" if "Any" in unique else " | ".join(sorted(unique, key=lambda part: part == "None"))


def _choice(value: Any) -> str:
    if isinstance(value, str):
        return repr(line(value, _MOST_CHOICE_CHARS))
    return repr(value) if value is None or isinstance(value, bool | int | float) else "..."


def _default(value: Any) -> Any:
    """Return a default that is shown; ``...`` stands for one that is not shown."""
    if value is ...:
        return None
    if isinstance(value, str):
        return line(value, _MOST_CHOICE_CHARS)
    try:
        return value if len(json.dumps(value)) <= _MOST_CHARS else ...
    except (TypeError, ValueError, RecursionError):
        return ...


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references within the document."""
    for _ in range(_MOST_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        found: Any = root if reference.startswith("#") else {}
        for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        schema = {} if found is None else found
    return {}
