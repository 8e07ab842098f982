"""Types of what goes to a driver and comes from it."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Parameters", "Row"]

#: The values of one row, in the order of the statement's columns.
Row: TypeAlias = tuple[Any, ...]
#: Values in the form that a driver accepts: by position or by name.
Parameters: TypeAlias = tuple[Any, ...] | dict[str, Any]
