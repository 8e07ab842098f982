"""Ids of the rows that a call writes for people: an attempt that repeats the call gives the same ids.

The call of a TOOL method runs again from its beginning if its worker dies. The rows of the first attempt
exist already, so a row with the same id is not written again. An effect is identified by its call, by the
lines of the plugin that cause it, and by how often they have caused it: a loop that sends a text three times
sends it three times, and a repetition sends what is missing. Its text does not count, since it may contain
a time, or what a model wrote.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from types import FrameType
from typing import Final
from uuid import uuid4

__all__ = ["effect_id", "effects_of"]

#: Packages whose frames are no part of a plugin: ours, and those that run its tasks and threads.
_RUNNERS: Final = frozenset(
    {"asyncio", "concurrent", "contextvars", "functools", "nekro_agent", "storage", "threading", "workers"}
)


class _Effects:
    """The effects of one attempt of a call; plugins may cause them on several threads."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._lock = threading.Lock()
        self._counts: Counter[bytes] = Counter()

    def next_id(self, kind: str, identity: tuple[str, ...]) -> str:
        effect = json.dumps([self._call_id, kind, identity, _lines_of_plugin()]).encode()
        digest = sha256(effect).digest()
        with self._lock:
            self._counts[digest] += 1
            number = self._counts[digest]
        return sha256(digest + b"%d" % number).hexdigest()[:32]


_effects: Final[ContextVar[_Effects | None]] = ContextVar("nekro_effects", default=None)


@contextmanager
def effects_of(call_id: str) -> Iterator[None]:
    """Let the code of the block, and the tasks that it starts, be one attempt of a call."""
    token = _effects.set(_Effects(call_id))
    try:
        yield
    finally:
        _effects.reset(token)


def effect_id(kind: str, *identity: str) -> str:
    """Return the id of a row that plugin code causes: 32 hexadecimal digits; random outside of calls.

    Call it before the first ``await``, so that concurrent effects count in the order of the plugin's code.

    Args:
        kind: what is written.
        identity: what distinguishes effects of the same line, such as the chat; not what may differ
            when the call is repeated.
    """
    effects = _effects.get()
    return uuid4().hex if effects is None else effects.next_id(kind, identity)


def _lines_of_plugin() -> list[tuple[str, str, int]]:
    """Return the plugin's part of the stack, the innermost frame first: module, function and line."""
    lines: list[tuple[str, str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _RUNNERS:
            lines.append((module, frame.f_code.co_qualname, frame.f_lineno))
        elif lines:
            break
        frame = frame.f_back
    return lines
