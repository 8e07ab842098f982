"""A method that blocked its event loop."""

from __future__ import annotations

from dataclasses import dataclass

from nekro.plugins.entries import RoutedEntry

__all__ = ["Blocking"]


@dataclass(frozen=True, kw_only=True)
class Blocking:
    """A method that was observed to block."""

    entry: RoutedEntry
    #: Duration so far; it may continue.
    seconds: float
    #: Innermost frame: ``file:line in function``.
    where: str
    #: The stack in the format of a traceback.
    stack: str
