"""Texts of servers on their way to prompts, logs and listings: bounded, and without control characters."""

from __future__ import annotations

import re
from typing import Final

from agent.text import neutralise

__all__ = ["line", "plain", "quoted"]

#: Characters that hide or reorder text: soft hyphen, zero-width ones, bidirectional controls, tags.
_HIDDEN: Final = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)


def plain(text: object, limit: int) -> str:
    """Return a text of at most ``limit`` characters, without control, invisible and reordering ones.

    Nothing in it resembles a tag of our prompts.
    """
    shown = str(text)
    is_cut = len(shown) > limit
    # Cut first: the rest of a huge text must cost nothing.
    shown = _HIDDEN.sub("", neutralise(shown[:limit]))
    return f"{shown.rstrip()}…" if is_cut else shown


def line(text: object, limit: int) -> str:
    """Return ``plain`` text as one line."""
    return " ".join(plain(text, limit).split())


def quoted(text: object, limit: int) -> str:
    """Return ``plain`` text as a quotation: each line begins with ``> ``."""
    return "\n".join(f"> {one.rstrip()}" for one in plain(text, limit).strip().split("\n"))
