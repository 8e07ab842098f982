"""Counts what a function does, in lines of Python; the number does not depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

__all__ = ["steps"]


def steps(work: Callable[[], object], *, most: float = float("inf")) -> int:
    """Return how many lines of Python ``work`` runs, those of libraries included; fail after ``most``."""
    count = 0

    def on_event(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count > most:
                pytest.fail(f"it took more than {most:g} steps")
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
