"""Tools as a server lists them, as plain data that is stored; bounded, as servers may list anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

__all__ = ["MOST_TOOLS", "ListedTool", "read_tools", "tools_text"]

#: Tools of one server that are used; the others are left out, with a warning.
MOST_TOOLS: Final = 500
_MOST_NAME_CHARS: Final = 200
_MOST_TITLE_CHARS: Final = 200
_MOST_DESCRIPTION_CHARS: Final = 8_000
_MOST_SCHEMA_BYTES: Final = 64 << 10
#: All schemas and descriptions of one server together.
_MOST_BYTES: Final = 2 << 20


@dataclass(frozen=True, kw_only=True)
class ListedTool:
    """One tool. Its annotations are claims of the server; None where it makes none."""

    name: str
    title: str = ""
    description: str = ""
    #: JSON schema of the arguments; ``{}`` if it was too large.
    input_schema: dict[str, Any]
    #: JSON schema of the structured result; None without one.
    output_schema: dict[str, Any] | None = None
    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None

    @property
    def may_repeat(self) -> bool:
        """Whether a call may run again after a worker or the server died in it."""
        return bool(self.read_only or self.idempotent)


def bounded_tool(
    *,
    name: str,
    title: str | None,
    description: str | None,
    input_schema: Mapping[str, Any],
    output_schema: Mapping[str, Any] | None,
    annotations: Mapping[str, bool | None],
) -> ListedTool:
    """Return a tool whose texts and schemas have their largest size at most."""
    return ListedTool(
        name=name[:_MOST_NAME_CHARS],
        title=(title or "")[:_MOST_TITLE_CHARS],
        description=(description or "")[:_MOST_DESCRIPTION_CHARS],
        input_schema=_bounded(input_schema) or {},
        output_schema=None if output_schema is None else _bounded(output_schema),
        **annotations,
    )


def bounded_listing(tools: Iterable[ListedTool]) -> tuple[list[ListedTool], int]:
    """Return the tools that are used, each name once, and how many were left out."""
    used: dict[str, ListedTool] = {}
    left_out = size = 0
    for tool in tools:
        size += len(json.dumps(asdict(tool)))
        if len(used) >= MOST_TOOLS or size > _MOST_BYTES or tool.name in used or not tool.name:
            left_out += 1
        else:
            used[tool.name] = tool
    return list(used.values()), left_out


def tools_text(tools: Iterable[ListedTool]) -> str:
    """Return the stored form; equal listings have equal texts."""
    return json.dumps([asdict(tool) for tool in tools], separators=(",", ":"))


def read_tools(text: str) -> tuple[ListedTool, ...]:
    """Read what ``tools_text`` of this or another release wrote."""
    known = {one.name for one in fields(ListedTool)}
    return tuple(
        ListedTool(**{key: value for key, value in item.items() if key in known}) for item in json.loads(text)
    )


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        return None
    return dict(schema) if len(text) <= _MOST_SCHEMA_BYTES else None
