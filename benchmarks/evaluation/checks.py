"""Checks of outcomes: what people see, not how it came about, so that they fit any model's wording."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks.evaluation.task import Check, Delivered, Seen

__all__ = ["delivers", "has_effect", "is_png", "made_call", "no_effect", "sends", "sends_nothing"]


def sends(*patterns: str) -> Check:
    """The messages together contain each pattern, whatever the case of letters."""

    def check(seen: Seen) -> str | None:
        everything = "\n".join(seen.texts)
        missing = [one for one in patterns if not re.search(one, everything, re.IGNORECASE)]
        return f"no message has {', '.join(missing)}; sent: {_short(everything)}" if missing else None

    return check


def sends_nothing() -> Check:
    """There is no message."""
    return lambda seen: f"sent: {_short(' | '.join(seen.texts))}" if any(seen.texts) else None


def delivers(name: str, content: Callable[[bytes], bool] | None = None, *, count: int = 1) -> Check:
    """The chat got at least ``count`` files whose name has the pattern, with such a content."""

    def fits(file: Delivered) -> bool:
        found = re.search(name, file.name, re.IGNORECASE) is not None
        return found and (content is None or content(file.content))

    def check(seen: Seen) -> str | None:
        if sum(map(fits, seen.files)) >= count:
            return None
        got = ", ".join(f"{file.name} ({len(file.content)} bytes)" for file in seen.files)
        return f"no {count} file(s) {name} of the content wanted; got: {got or 'none'}"

    return check


def has_effect(kind: str, *, times: int = 1, **fields: Any) -> Check:
    """So many effects of this kind have these fields, no more and no fewer."""

    def check(seen: Seen) -> str | None:
        fitting = [
            effect
            for effect in seen.effects
            if effect.kind == kind and all(effect.fields.get(name) == fields[name] for name in fields)
        ]
        if len(fitting) == times:
            return None
        return f"{len(fitting)} effects {kind} {fields} instead of {times}; all: {list(seen.effects)}"

    return check


def no_effect(kind: str) -> Check:
    """There is no effect of this kind."""
    return has_effect(kind, times=0)


def made_call(method: str) -> Check:
    """A call of the method did not fail."""

    def check(seen: Seen) -> str | None:
        return None if method in seen.calls else f"{method} was not called; called: {list(seen.calls)}"

    return check


def is_png(content: bytes) -> bool:
    """Whether a content begins as a PNG does and is more than a head."""
    return content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 100


def _short(text: str) -> str:
    return repr(text if len(text) <= 300 else f"{text[:300]}…")
