"""Handles of texts that a prompt may show cut: by them, `read_rest` finds the whole text."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["of_message", "of_output", "of_result"]

#: Ids of rows; others are not written into a prompt, where a handle stands in quotes.
_PLAIN: Final = re.compile(r"[\w.:-]{1,200}", re.ASCII)


def of_message(message_id: str) -> str | None:
    """Return the handle of a message's text."""
    return _handle("message", message_id)


def of_output(round_id: str) -> str | None:
    """Return the handle of the output of a round's program."""
    return _handle("round", round_id)


def of_result(call_id: str | None, part: int | None = None) -> str | None:
    """Return the handle of a call's result.

    Args:
        part: index of a text among the parts of a MULTIMODAL_AGENT result; None: the text of an AGENT result.
    """
    return _handle("call", call_id or "", "" if part is None else f"#{part}")


def _handle(kind: str, name: str, rest: str = "") -> str | None:
    return f"{kind}:{name}{rest}" if _PLAIN.fullmatch(name) else None
