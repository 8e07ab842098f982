"""The catalogue of methods for those who write code for `run_code`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from nekro.plugins.entries import MethodEntry
from nekro.plugins.entry_registry import Registry

__all__ = ["bounded_catalogue", "code_guide", "find_methods"]

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
        f"{_name(registry, entry)}{entry.signature}  # {entry.type.value}, of {entry.plugin_key}"
        f"{', a person must approve each call' if entry.requires_approval else ''}\n"
        f"{entry.doc or ''}".rstrip()
        for entry in entries
    )


def _in_brief(registry: Registry, entries: Iterable[MethodEntry]) -> str:
    plugins: dict[str, list[str]] = {}
    for entry in entries:
        line = (entry.doc or "").strip().partition("\n")[0]
        short = line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…"
        plugins.setdefault(entry.plugin_key, []).append(f"- {_name(registry, entry)}: {short}".rstrip(": "))
    return "\n\n".join("\n".join([f"## {key}", *lines]) for key, lines in plugins.items())


def _by_plugin(registry: Registry, entries: Iterable[MethodEntry]) -> str:
    counts = Counter(entry.plugin_key for entry in entries)
    return "\n".join(
        f"- {key}: {count} methods; find_methods {key!r} lists them" for key, count in counts.items()
    )


def _name(registry: Registry, entry: MethodEntry) -> str:
    """Return the name by which code calls a method."""
    return next(iter(registry.bare_names(entry)), entry.task)
