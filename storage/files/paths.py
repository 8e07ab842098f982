"""Which paths an area may hold.

Paths come from programs in sandboxes, and from manifests that a database returns. They become files of a
host, so each is checked before it is stored and again before it is used.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Final

from nekro_agent.errors import InvalidValueError
from nekro_agent.files.safe_paths import MAX_DEPTH

__all__ = [
    "MAX_NAME_BYTES",
    "MAX_PATH_BYTES",
    "checked_path",
    "collision",
    "folded_path",
    "parents_of",
    "refuse_collisions",
]

#: As Linux limits a name and a path.
MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 4000
_SHOWN_CHARS: Final = 100


def checked_path(path: str) -> str:
    """Return a path relative to an area unchanged.

    Raises:
        InvalidValueError: it is absolute, leaves the area, is not in its shortest form, has a name that a
            file system refuses, or is no text in UTF-8. The message contains the path, escaped.
    """
    reason = _fault_of(path)
    if reason is not None:
        raise InvalidValueError(f"path {ascii(path)[:_SHOWN_CHARS]} cannot be a file of an area: {reason}")
    return path


def _fault_of(path: str) -> str | None:
    if not path:
        return "it is empty"
    if "\0" in path:
        return "it contains NUL"
    if path.startswith("/"):
        return "it is absolute"
    try:
        names = [name.encode() for name in path.split("/")]
    except UnicodeEncodeError:
        return "it is no text in UTF-8"
    if b".." in names:
        return "it contains '..'"
    if b"" in names or b"." in names:
        return "it has an empty name or '.'"
    if max(map(len, names)) > MAX_NAME_BYTES:
        return f"a name has more than {MAX_NAME_BYTES} bytes"
    if len(names) > MAX_DEPTH:  # no host could open it
        return f"it is deeper than {MAX_DEPTH} directories"
    if sum(map(len, names)) + len(names) > MAX_PATH_BYTES:
        return f"it has more than {MAX_PATH_BYTES} bytes"
    return None


def folded_path(path: str) -> str:
    """Return what is equal for paths that some file system takes for one: a digest of 32 characters.

    Source: canonical caseless matching, section 3.13 of the Unicode standard (D145).
    """
    if path.isascii():
        folded = path.lower()
    else:
        folded = unicodedata.normalize("NFD", unicodedata.normalize("NFD", path).casefold())
    return hashlib.blake2b(folded.encode(), digest_size=16).hexdigest()


def parents_of(path: str) -> Iterator[str]:
    """Yield the directories of a path within its area, from the innermost to the outermost."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def refuse_collisions(paths: Iterable[str]) -> dict[str, str]:
    """Return the paths by their folded form.

    Raises:
        InvalidValueError: two of them differ only in case or in the form of their letters; it names both.
    """
    by_fold: dict[str, str] = {}
    for path in paths:
        other = by_fold.setdefault(folded_path(path), path)
        if other != path:
            raise collision(path, other)
    return by_fold


def collision(path: str, other: str) -> InvalidValueError:
    """Return the error for two paths that some file systems take for one."""
    return InvalidValueError(
        f"{ascii(path)[:_SHOWN_CHARS]} and {ascii(other)[:_SHOWN_CHARS]} differ only in case or in the form "
        "of their letters, so one file would replace the other on some hosts; rename one of them"
    )
