"""Parameters of lists whose routes are no operations."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

__all__ = ["Cursor", "Limit"]

Limit = Annotated[int, Query(ge=1, le=200)]
Cursor = Annotated[str | None, Query(max_length=2000)]
