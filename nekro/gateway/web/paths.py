"""Encoded slashes in paths.

Servers decode a path before it is routed, so the ``%2F`` of a chat key would end a segment. Here each segment
is decoded by itself, and a slash inside a segment is replaced by a noncharacter until the route has it.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote_to_bytes

__all__ = ["decoded", "restored"]

#: A Unicode noncharacter, which no text for interchange contains.
_SLASH: Final = "\ufdef"


def decoded(raw_path: bytes) -> str | None:
    """Return the path to route; None if it is not UTF-8, or contains the replacement of a slash."""
    segments = []
    for raw in raw_path.partition(b"?")[0].split(b"/"):
        try:
            segment = unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            return None
        if _SLASH in segment:
            return None
        segments.append(segment.replace("/", _SLASH))
    return "/".join(segments)


def restored(segment: str) -> str:
    """Return a segment with its slashes."""
    return segment.replace(_SLASH, "/")
