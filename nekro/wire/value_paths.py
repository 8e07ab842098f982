"""Locates an object inside a value, for error messages: ``value['rows'][3].session``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

__all__ = ["path_to"]

_MAX_LOOKED_AT: Final = 100_000
_MAX_KEY_CHARS: Final = 40
_LEAVES: Final = (str, bytes, bytearray, int, float, type(None))


def path_to(wanted: object, value: object) -> str:
    """Return the shortest path, as an expression that begins with ``value``.

    Args:
        wanted: an object inside ``value``, or the class of one.

    Returns:
        ``something in the value`` when it is not found, for instance because pickling created it.
    """
    pending = deque([("value", value)])
    seen: set[int] = set()
    while pending and len(seen) < _MAX_LOOKED_AT:
        path, item = pending.popleft()
        if item is wanted or type(item) is wanted:
            return path
        if isinstance(item, _LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        pending.extend((path + step, part) for step, part in _parts(item))
    return "something in the value"


def _parts(item: Any) -> Iterator[tuple[str, object]]:
    if isinstance(item, dict):
        for key, part in dict.items(item):
            yield f"[{_shown(key)}]", part
            yield ".keys()", key
    elif isinstance(item, list | tuple | deque):
        for index, part in enumerate(item):
            yield f"[{index}]", part
    elif isinstance(item, set | frozenset):
        for part in item:
            yield "{…}", part
    yield from _attributes(item)


def _attributes(item: Any) -> Iterator[tuple[str, object]]:
    if isinstance(item, type):
        return
    names = list(getattr(item, "__dict__", ()))
    for base in type(item).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        try:
            part = getattr(item, name)
        except Exception:  # noqa: S112 - an attribute that cannot be read cannot be searched
            continue
        yield f".{name}", part


def _shown(key: object) -> str:
    text = repr(key) if isinstance(key, _LEAVES) else type(key).__name__
    return text if len(text) <= _MAX_KEY_CHARS else text[:_MAX_KEY_CHARS] + "…"
