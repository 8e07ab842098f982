"""Tools as a server lists them, as plain data that is stored; bounded, as servers may list anything.

Each entry of a listing is read for itself: a faulty one costs no other one, and what can be understood of it
is used. Texts of servers go to prompts, logs and listings bounded, and without control characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from nekro.agent.text import neutralise
from nekro.base.plain import known_fields
from nekro_agent.tools.visible_text import without_invisible

__all__ = [
    "HEADER_FAULT",
    "MOST_TOOLS",
    "ListedTool",
    "Listing",
    "Note",
    "line",
    "plain",
    "quoted",
    "read_tools",
    "tools_text",
]


def plain(text: object, limit: int) -> str:
    """Return a text of at most ``limit`` characters, without control, invisible and reordering ones.

    Nothing in it resembles a tag of our prompts.
    """
    shown = str(text)
    is_cut = len(shown) > limit
    # Cut first: the rest of a huge text must cost nothing.
    shown = without_invisible(neutralise(shown[:limit]), joiners=False)
    return f"{shown.rstrip()}…" if is_cut else shown


def line(text: object, limit: int) -> str:
    """Return ``plain`` text as one line."""
    return " ".join(plain(text, limit).split())


def quoted(text: object, limit: int) -> str:
    """Return ``plain`` text as a quotation: each line begins with ``> ``."""
    return "\n".join(f"> {one.rstrip()}" for one in plain(text, limit).strip().split("\n"))


#: Key of an entry whose schema asks for headers that are invalid: why they are.
HEADER_FAULT: Final = "nekro.header_fault"
#: Tools of one server that are used; the others are left out, with a note.
MOST_TOOLS: Final = 500
#: Longer names are refused: a call needs the whole name.
_MOST_NAME_CHARS: Final = 200

_MOST_TITLE_CHARS: Final = 200

_MOST_DESCRIPTION_CHARS: Final = 8_000

_MOST_SCHEMA_BYTES: Final = 64 << 10
#: Objects and lists in each other, in one schema.
_MOST_DEPTH: Final = 100
#: All schemas and descriptions of one server together.
_MOST_BYTES: Final = 2 << 20
#: Notes of one listing.
_MOST_NOTES: Final = 50

_SHOWN_NAME_CHARS: Final = 60
#: These keys of a schema combine other schemas.
_COMBINING: Final = ("anyOf", "oneOf", "allOf", "$ref")

_HINTS: Final = {
    "read_only": "readOnlyHint",
    "destructive": "destructiveHint",
    "idempotent": "idempotentHint",
    "open_world": "openWorldHint",
}


@dataclass(frozen=True, kw_only=True)
class ListedTool:
    """One tool. Its annotations are claims of the server; None where it makes none."""

    name: str
    title: str = ""
    description: str = ""
    #: JSON schema of the arguments; ``{}`` without a usable one, which accepts any.
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


@dataclass(frozen=True, kw_only=True)
class Note:
    """What is wrong with an entry of a listing, or with the listing."""

    #: Name of the tool, or its place; None for the whole listing.
    tool: str | None
    reason: str
    #: Whether the tool cannot be called; else the rest of the entry is used.
    is_left_out: bool = False


@dataclass
class Listing:
    """The tools of one server, page by page; each name once."""

    tools: list[ListedTool] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    #: The tools by name, with the page that listed each.
    _by_name: dict[str, tuple[ListedTool, int]] = field(default_factory=dict)
    _pages: int = 0
    _seen: int = 0
    _bytes: int = 0
    _more_notes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether no further tool is used."""
        return len(self.tools) >= MOST_TOOLS or self._bytes > _MOST_BYTES

    def add(self, entries: list[Any]) -> bool:
        """Add the entries of a page, whatever they are; returns whether one of them is new."""
        self._pages += 1
        before = len(self.tools) + len(self.notes)
        for entry in entries:
            self._seen += 1
            if self.is_full:
                self.note(None, f"only the first {len(self.tools)} tools are used")
                break
            self._add(entry)
        return len(self.tools) + len(self.notes) > before

    def note(self, tool: str | None, reason: str, *, is_left_out: bool = False) -> None:
        """Keep a note; of more than ``_MOST_NOTES``, their number."""
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(Note(tool=tool, reason=reason, is_left_out=is_left_out))
        else:
            self._more_notes += 1

    def described_notes(self) -> list[dict[str, Any]]:
        """Return the notes as plain data."""
        notes = [asdict(note) for note in self.notes]
        if self._more_notes:
            more = Note(tool=None, reason=f"and {self._more_notes} more notes")
            notes.append(asdict(more))
        return notes

    def _add(self, entry: object) -> None:
        raw = entry.get("name") if isinstance(entry, Mapping) else None
        shown = line(raw, _SHOWN_NAME_CHARS) if isinstance(raw, str) else ""
        label = shown or f"entry {self._seen}"
        if (fault := self._fault(entry, raw)) is not None:
            self.note(label, fault, is_left_out=True)
            return
        assert isinstance(entry, Mapping) and isinstance(raw, str)  # noqa: S101 - checked by `_fault`
        reasons: list[str] = []
        tool = _read(raw, entry, reasons)
        if raw in self._by_name:
            known, page = self._by_name[raw]
            if known != tool or page == self._pages:
                self.note(label, "another tool has the same name", is_left_out=True)
            return  # the same tool on a further page: the server sends a page again
        self._bytes += len(json.dumps(asdict(tool)))
        if self._bytes > _MOST_BYTES:
            self.note(label, f"the listing has more than {_MOST_BYTES} bytes", is_left_out=True)
            return
        self._by_name[raw] = tool, self._pages
        self.tools.append(tool)
        for reason in reasons:
            self.note(label, reason)

    def _fault(self, entry: object, name: object) -> str | None:
        """Return why a tool cannot be called; None if it can."""
        if not isinstance(entry, Mapping):
            return "the entry is not an object"
        if not isinstance(name, str) or not name.strip():
            return "it has no name"
        if len(name) > _MOST_NAME_CHARS:
            return f"its name has more than {_MOST_NAME_CHARS} characters"
        if HEADER_FAULT in entry:
            return f"its x-mcp-header is invalid: {entry[HEADER_FAULT]}"
        return None


def _read(name: str, entry: Mapping[str, Any], reasons: list[str]) -> ListedTool:
    """Return the tool of an entry; ``reasons`` gets what is wrong with it."""
    hints = entry.get("annotations")
    if hints is not None and not isinstance(hints, Mapping):
        reasons.append("its annotations are not an object and are ignored")
    claims = hints if isinstance(hints, Mapping) else {}
    if any(claims.get(key) is not None and not isinstance(claims[key], bool) for key in _HINTS.values()):
        reasons.append("a hint of its annotations is neither true nor false and is ignored")
    if not _are_icons(entry.get("icons")):
        reasons.append("its icons are invalid and are ignored")
    title = _text(entry, "title", reasons) or _text(claims, "title", [])
    return ListedTool(
        name=name,
        title=title[:_MOST_TITLE_CHARS],
        description=_text(entry, "description", reasons)[:_MOST_DESCRIPTION_CHARS],
        input_schema=_input_schema(entry, reasons),
        output_schema=_output_schema(entry.get("outputSchema"), reasons),
        **{key: claims[hint] if isinstance(claims.get(hint), bool) else None for key, hint in _HINTS.items()},
    )


def _text(entry: Mapping[str, Any], key: str, reasons: list[str]) -> str:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        reasons.append(f"its {key} is not a text and is ignored")
    return value if isinstance(value, str) else ""


def _input_schema(entry: Mapping[str, Any], reasons: list[str]) -> dict[str, Any]:
    """Return the schema of the arguments; ``{}`` accepts any."""
    key = "inputSchema" if "inputSchema" in entry or "input_schema" not in entry else "input_schema"
    value = _parsed(entry.get(key))
    passes = "its arguments are passed on as they are"
    if value is None:
        reasons.append(f"it has no inputSchema; {passes}")
        return {}
    if not isinstance(value, dict):
        reasons.append(f"its inputSchema is not an object; {passes}")
        return {}
    schema = _bounded(value)
    if schema is None:
        reasons.append(
            f"its inputSchema is nested too deeply or has more than {_MOST_SCHEMA_BYTES} bytes; {passes}"
        )
        return {}
    if found := [one for one in _COMBINING if one in schema]:
        reasons.append(
            f"its inputSchema has {' and '.join(found)} at the top; the server checks its arguments"
        )
    elif schema.get("type") != "object":
        reasons.append("its inputSchema does not have the type object")
    return schema


def _output_schema(value: Any, reasons: list[str]) -> dict[str, Any] | None:
    value = _parsed(value)
    if value is None:
        return None
    schema = _bounded(value) if isinstance(value, dict) else None
    if schema is None:
        what = "too large" if isinstance(value, dict) else "not an object"
        reasons.append(f"its outputSchema is {what} and is ignored")
    elif schema.get("type", "object") != "object":
        reasons.append(
            f"its outputSchema has the type {line(schema['type'], 40)}, not object; results are not checked"
        )
    return schema


def _parsed(value: Any) -> Any:
    """Return a schema that was sent as a text."""
    if isinstance(value, str) and len(value) <= _MOST_SCHEMA_BYTES:
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _are_icons(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and all(
        isinstance(icon, Mapping) and isinstance(icon.get("src"), str) for icon in value
    )


def tools_text(tools: Iterable[ListedTool]) -> str:
    """Return the stored form; equal listings have equal texts."""
    return json.dumps([asdict(tool) for tool in tools], separators=(",", ":"))


def read_tools(text: str) -> tuple[ListedTool, ...]:
    """Read what ``tools_text`` of this or another release wrote."""
    return tuple(ListedTool(**known_fields(ListedTool, item)) for item in json.loads(text))


def _bounded(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        if len(json.dumps(schema)) > _MOST_SCHEMA_BYTES or _is_deeper(schema, _MOST_DEPTH):
            return None
        return dict(schema)
    except (TypeError, ValueError, RecursionError):
        return None


def _is_deeper(value: object, depth: int) -> bool:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return depth == 0 or any(_is_deeper(part, depth - 1) for part in parts)
