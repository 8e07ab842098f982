"""Tells of the beginning of an answer whether it may still become a program without a block."""

from __future__ import annotations

import re
from collections.abc import Collection
from keyword import kwlist, softkwlist
from typing import Final

from nekro.agent.answers.replies import begins_program, calls_first

__all__ = ["is_certainly_words"]

#: Characters of a beginning that are looked at; one that shows nothing until then is not decided here.
_MOST_CHARS: Final = 2_000
_KEYWORDS: Final = frozenset([*kwlist, *softkwlist])
_STRING_PREFIXES: Final = frozenset(["b", "br", "f", "fr", "r", "rb", "rf", "rt", "t", "tr", "u"])
_TOKEN: Final = re.compile(
    r"(?P<open>\"\"\"|'''|[\"'](?![^\n]*[\"']))"
    r"|(?P<string>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
    r"|(?P<name>[^\W\d]\w*)"
    r"|(?P<number>\d[\w.]*)"
    r"|(?P<comment>#[^\n]*)"
    r"|(?P<blank>[ \t\u00a0\u2000-\u200d\u202f\u205f\u2060\u3000\ufeff]+)"
    r"|(?P<line>\n)"
    r"|(?P<closing>[)\]}])"
    r"|(?P<never>[?$`]|!(?=[^=])|[^\x00-\x7f])"
    r"|(?P<other>.)",
    re.DOTALL,
)
#: Lines before the first statement.
_COMMENTS: Final = re.compile(r"(?:\s*#[^\n]*(?:\n|\Z))*\s*")
#: What no statement begins with.
_NO_STATEMENT: Final = (*">|&%/=,;:)]}", "**")
_VALUES: Final = frozenset({"name", "number", "string", "closing"})


def is_certainly_words(text: str, names: Collection[str]) -> bool:
    """Whether an answer that begins with a text, and has no block there, is no program however it goes on.

    It is none if Python cannot read it: two names side by side, a character that Python does not have. A call
    of a known method that begins the text decides nothing, because words behind it make it neither.

    Args:
        names: names of the methods that programs may call.
    """
    head = _COMMENTS.sub("", text[:_MOST_CHARS], count=1)
    if not head or calls_first(head, names):
        return False
    if head.startswith("`"):  # the whole answer may be code between two backticks
        code, closing, rest = head[1:].partition("`")
        return bool(closing and code and rest.strip() and rest[0] != "`")
    first, is_complete, _ = head.partition("\n")
    if first.startswith(("import", "from")) and (not is_complete or begins_program(first, names)):
        return False
    return head.startswith(_NO_STATEMENT) or _is_no_python(head)


def _is_no_python(text: str) -> bool:
    """Whether a text has what Python cannot read whatever follows."""
    before, end = "", 0
    for token in _TOKEN.finditer(text):
        kind, found = str(token.lastgroup), token.group()
        is_adjacent, end = token.start() == end and before != "", token.end()
        if kind == "never":
            return True
        if kind in ("open", "string") and is_adjacent and _is_no_prefix(text, token.start()):
            return True
        if kind == "open":
            return False
        if kind in ("name", "number", "string"):
            if kind == "name" and (token.end() == len(text) or found in _KEYWORDS):
                before = "" if found in _KEYWORDS else "name"
                continue
            if before in _VALUES and not (kind == "string" and (is_adjacent or before == "string")):
                return True
            before = kind
        elif kind == "closing":
            before = kind
        elif kind not in ("blank", "comment"):
            before = ""
    return False


def _is_no_prefix(text: str, at: int) -> bool:
    """Whether the name that ends at a quotation mark is none that a string of Python may begin with."""
    name = re.search(r"\w+$", text[max(0, at - 40) : at])
    return name is not None and name.group().lower() not in _STRING_PREFIXES
