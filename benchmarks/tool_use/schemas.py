"""Methods as tools of the OpenAI chat API."""

from __future__ import annotations

import ast
from typing import Any, Final, Protocol

__all__ = ["Described", "tool_name", "tool_of"]

_TYPES: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_BASES: Final = {"list": "array", "tuple": "array", "dict": "object"}


class Described(Protocol):
    """A method as the catalogue or the HTTP API describes it."""

    @property
    def task(self) -> str:
        """Its full name."""

    @property
    def signature(self) -> str:
        """Its parameters and result, as in source code."""

    @property
    def doc(self) -> str | None:
        """Its documentation."""


def tool_name(method: str) -> str:
    """Return a method's name as the API allows it."""
    return method.replace(".", "__")


def tool_of(entry: Described) -> dict[str, Any]:
    """Return the tool of a method."""
    parsed = ast.parse(f"def f{entry.signature}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    given = parsed.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    required = [one.arg for one in names[: len(names) - len(given.defaults) - len(given.kwonlyargs)]]
    required += [
        one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None
    ]
    properties = {one.arg: _schema(one.annotation) for one in names}
    return {
        "type": "function",
        "function": {
            "name": tool_name(entry.task),
            "description": entry.doc or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _schema(annotation: ast.expr | None) -> dict[str, Any]:
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        base = _BASES.get(annotation.value.id)
        return {"type": base} if base else {}
    if isinstance(annotation, ast.Name) and annotation.id in (*_TYPES, *_BASES):
        return {"type": (_TYPES | _BASES)[annotation.id]}
    return {}
