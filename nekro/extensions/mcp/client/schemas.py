"""JSON schemas of tools as Python signatures: names, annotations and shapes.

A schema is data of a server: it is read to a bounded depth and length, and never evaluated.
"""

from __future__ import annotations

import inspect
import json
import keyword
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from nekro.extensions.mcp.client.tools import line

__all__ = ["CONTEXT", "Argument", "annotation", "arguments_of", "identifier", "shape", "signature_of"]

#: Name of the first parameter, which receives the context; no argument has it.
CONTEXT: Final = "_ctx"
_MOST_ARGUMENTS: Final = 100
_MOST_DEPTH: Final = 5
#: Schemas that are combined at the top.
_MOST_PARTS: Final = 100
_MOST_CHARS: Final = 160
#: Of a shape; documentation shows less.
_MOST_SHAPE_CHARS: Final = 2_000
_MOST_REFERENCE_CHARS: Final = 200
_MOST_CHOICES: Final = 16
_MOST_CHOICE_CHARS: Final = 40
_NOTHING: Final[Mapping[str, Any]] = {}
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
    #: Its type with the fields of objects.
    shape: str


def identifier(name: str, taken: Container[str] = ()) -> str:
    """Return a name as a Python identifier, with a number if that is taken."""
    base = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:60] or "tool"
    if base[0].isdigit():
        base = f"_{base}"
    if keyword.iskeyword(base) or base in ("None", "True", "False", CONTEXT):
        base = f"{base}_"
    found, number = base, 2
    while found in taken:
        found, number = f"{base}_{number}", number + 1
    return found


def arguments_of(schema: Mapping[str, Any]) -> tuple[list[Argument], bool]:
    """Return the arguments of an ``inputSchema``, required ones first, and whether others are accepted.

    Schemas that are combined at the top count together: each of their arguments may be passed, and those that
    all alternatives require are required.
    """
    reader = _Reader(schema)
    whole = _Arguments(reader)
    whole.add(schema)
    properties, required = whole.properties, whole.required
    found: list[Argument] = []
    for key, one in list(properties.items())[:_MOST_ARGUMENTS]:
        resolved = reader.resolved(one) if isinstance(one, Mapping) else _NOTHING
        kind = reader.annotation(one)
        found.append(
            Argument(
                name=identifier(str(key), {argument.name for argument in found}),
                key=str(key),
                annotation=kind,
                is_required=key in required,
                default=resolved.get("default", ...),
                is_nullable="None" in kind.split(" | ") or kind == "Any",
                description=str(one.get("description") or resolved.get("description") or "")
                if isinstance(one, Mapping)
                else "",
                shape=reader.shape(one),
            )
        )
    return sorted(found, key=lambda argument: not argument.is_required), whole.is_open


class _Arguments:
    """The arguments of a schema together with those that it combines at the top."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self.properties: dict[str, Any] = {}
        self.required: set[str] = set()
        self._is_open: bool | None = None
        self._names_some = False
        self._parts = 0

    @property
    def is_open(self) -> bool:
        """Whether further arguments are accepted: where a schema says so, names none, or names too many."""
        if len(self.properties) > _MOST_ARGUMENTS:
            return True
        return not (self._names_some or self.properties) if self._is_open is None else self._is_open

    def add(self, part: Any, depth: int = 0) -> set[str]:
        """Add the arguments of a part; returns those that it requires by itself."""
        self._parts += 1
        if not isinstance(part, Mapping) or depth > _MOST_DEPTH or self._parts > _MOST_PARTS:
            return set()
        required = self._own(part)
        if "$ref" in part and (target := self._reader.resolved(part)) is not part:
            required |= self.add(target, depth + 1)
        for key in ("allOf", "anyOf", "oneOf"):
            listed = part.get(key)
            options = [self.add(one, depth + 1) for one in listed] if isinstance(listed, list) else []
            if options:
                required |= set.union(*options) if key == "allOf" else set.intersection(*options)
        if depth == 0:
            self.required = required
            for name in sorted(required):
                self.properties.setdefault(name, _NOTHING)
        return required

    def _own(self, part: Mapping[str, Any]) -> set[str]:
        properties = part.get("properties")
        if isinstance(properties, Mapping):
            self._names_some = True
            for key, one in properties.items():
                self.properties.setdefault(str(key), one)
        others = part.get("additionalProperties")
        if others is True or isinstance(others, Mapping):
            self._is_open = True
        elif others is False and self._is_open is None:
            self._is_open = False
        return _required(part)


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
        name = identifier("more", {parameter.name for parameter in parameters})
        parameters.append(inspect.Parameter(name, inspect.Parameter.VAR_KEYWORD, annotation="Any"))
    return inspect.Signature(parameters, return_annotation=returns)


def annotation(schema: Any) -> str:
    """Return the Python type of a whole schema, for people and models."""
    return _Reader(schema).annotation(schema)


def shape(schema: Any) -> str:
    """Return the type of a whole schema with the fields of objects: ``list[{'name': str, 'size'?: int}]``."""
    return _Reader(schema).shape(schema)


class _Reader:
    """Reads the parts of one document, each of them once at each depth.

    Otherwise a part that refers to itself more than once would make the work grow exponentially.
    """

    def __init__(self, document: Any) -> None:
        self._document: Mapping[str, Any] = document if isinstance(document, Mapping) else _NOTHING
        #: By the kind of text, the identity of the part, and the depth.
        self._texts: dict[tuple[str, int, int], str] = {}
        #: By the identity of the part: where its references lead.
        self._targets: dict[int, Mapping[str, Any]] = {}

    def resolved(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return where the references of a part lead."""
        if id(part) not in self._targets:
            self._targets[id(part)] = _resolved(part, self._document)
        return self._targets[id(part)]

    def annotation(self, part: Any, depth: int = 0) -> str:
        """Return the type of a part."""
        return self._once(self._annotation, part, depth)

    def shape(self, part: Any, depth: int = 0) -> str:
        """Return the type of a part with the fields of objects."""
        return self._once(self._shape, part, depth)

    def _once(self, read: Callable[[Mapping[str, Any], int], str], part: Any, depth: int) -> str:
        if depth > _MOST_DEPTH or not isinstance(part, Mapping):
            return "Any"
        resolved = self.resolved(part)
        key = (read.__name__, id(resolved), depth)
        if key not in self._texts:
            self._texts[key] = read(resolved, depth)
        return self._texts[key]

    def _shape(self, part: Mapping[str, Any], depth: int) -> str:
        if part.get("type") == "array":
            return f"list[{self.shape(part.get('items'), depth + 1)}]"
        properties = part.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self.annotation(part)
        needed = _required(part)
        fields = [
            f"{_choice(str(key))}{'' if key in needed else '?'}: {self.shape(one, depth + 1)}"
            for key, one in list(properties.items())[:_MOST_ARGUMENTS]
        ]
        return f"{{{', '.join(fields)}}}"[:_MOST_SHAPE_CHARS]

    def _annotation(self, part: Mapping[str, Any], depth: int) -> str:
        text = self._type(part, depth)
        return text if len(text) <= _MOST_CHARS else "Any"

    def _type(self, part: Mapping[str, Any], depth: int) -> str:
        if "const" in part:
            return f"Literal[{_choice(part['const'])}]"
        choices = part.get("enum")
        if isinstance(choices, list) and choices:
            more = ["..."] if len(choices) > _MOST_CHOICES else []
            return f"Literal[{', '.join([*map(_choice, choices[:_MOST_CHOICES]), *more])}]"
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list) and part[key]:
                return _union(self.annotation(one, depth + 1) for one in part[key])
        parts = part.get("allOf")
        if isinstance(parts, list) and len(parts) == 1:
            return self.annotation(parts[0], depth + 1)
        kind = part.get("type")
        if isinstance(kind, list):
            return _union(self._of_kind(one, part, depth + 1) for one in kind[:_MOST_CHOICES])
        return self._of_kind(kind, part, depth)

    def _of_kind(self, kind: Any, part: Mapping[str, Any], depth: int) -> str:
        if kind == "array":
            items = part.get("items")
            return f"list[{self.annotation(items, depth + 1)}]" if isinstance(items, Mapping) else "list"
        if kind == "object" or "properties" in part:
            values = part.get("additionalProperties")
            if isinstance(values, Mapping) and values and not part.get("properties"):
                return f"dict[str, {self.annotation(values, depth + 1)}]"
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


def _required(schema: Mapping[str, Any]) -> set[str]:
    listed = schema.get("required")
    return {key for key in listed if isinstance(key, str)} if isinstance(listed, list) else set()


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references within the document."""
    for _ in range(_MOST_DEPTH):
        if not isinstance(schema, Mapping):
            return _NOTHING
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#") or len(reference) > _MOST_REFERENCE_CHARS:
            return _NOTHING
        found: Any = root
        for part in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        schema = found
    return _NOTHING
