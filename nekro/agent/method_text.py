"""Writes methods as prompts and answers of `help_of` show them.

Documentation is the text of a plugin, or of the server that it stands for: it is bounded, and cannot forge
the tags of a prompt.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from nekro.agent.model import MethodBrief
from nekro.agent.text import attribute, cut_middle, neutralise

__all__ = ["MOST_DOC_CHARS", "method_line", "method_text", "summary"]

#: Longest documentation of one method in a shortened list, and in the answer of `help_of`.
MOST_DOC_CHARS: Final = 4_000
_SUMMARY_CHARS: Final = 100
_AGENT_MARK: Final = " - **[AGENT METHOD - STOP AFTER CALL]**"


def method_text(method: MethodBrief, *, limit: int | None = MOST_DOC_CHARS) -> str:
    """Return a method in full: name, signature and documentation.

    Args:
        limit: most characters of the documentation; None does not limit.
    """
    head = f"* {method.name}{method.signature}{_AGENT_MARK if method.type.wakes_agent else ''}"
    doc = (method.doc or "").strip()
    shown = doc if limit is None else cut_middle(doc, limit)
    return neutralise(f"{head}\n{shown}" if shown else head)


@lru_cache(maxsize=4096)
def method_line(method: MethodBrief) -> str:
    """Return a method as one line: its name and what it does."""
    text = summary(method.doc)
    return neutralise(f"* {method.name}") + (f" - {text}" if text else "")


def summary(doc: str | None) -> str:
    """Return the first line of a documentation, shortened and safe for a prompt; "" without one."""
    line = (doc or "").strip().split("\n")[0]
    return attribute(neutralise(line), limit=_SUMMARY_CHARS)
