"""Texts of servers on their way to prompts, logs and listings: bounded, and without control characters."""

from __future__ import annotations

from nekro.agent.text import neutralise
from nekro_agent.tools.visible_text import without_invisible

__all__ = ["line", "plain", "quoted"]


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
