"""Names the files of messages in a prompt, so that code can open them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from nekro.agent.model import HistoryFile
from nekro.agent.text import attribute

__all__ = ["described", "file_path"]

#: Characters that could end a mark of a prompt or begin a tag.
_MARKS: Final = frozenset("<>[]\"'\\\uff1c\ufe64")


def file_path(path: str) -> str:
    """Return a path in the form in which code opens it.

    A path with characters that could end a mark or forge a tag is written as a Python literal.

    >>> file_path("/app/uploads/a b.png")
    '/app/uploads/a b.png'
    >>> print(file_path("/app/uploads/<x>"))
    '/app/uploads/\\x3cx\\x3e'
    """
    if all(_is_plain(character) for character in path) and path == " ".join(path.split()):
        return path
    return f"'{''.join(one if _is_plain(one) else _escaped(one) for one in path)}'"


def described(file: HistoryFile) -> str:
    """Return a file's path, then what is known of its name, media type and size."""
    facts = []
    if file.name and file.name != PurePosixPath(file.path).name:
        facts.append(f"sent as {attribute(file.name)}")
    if file.media_type:
        facts.append(attribute(file.media_type))
    if file.size_bytes is not None:
        facts.append(f"{file.size_bytes} bytes")
    return file_path(file.path) + (f" ({', '.join(facts)})" if facts else "")


def _is_plain(character: str) -> bool:
    return character.isprintable() and character not in _MARKS


def _escaped(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
