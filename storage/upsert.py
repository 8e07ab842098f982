"""``INSERT … ON CONFLICT`` for both databases; SQLAlchemy has a separate class for each dialect."""

from __future__ import annotations

from typing import cast

from sqlalchemy import Table
from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["insert"]


def insert(dialect: str, table: Table) -> postgresql.Insert:
    """Return the dialect's INSERT, which has ``on_conflict_do_update`` and ``on_conflict_do_nothing``.

    Args:
        dialect: ``sqlite`` or ``postgresql``.
    """
    if dialect == "sqlite":
        # The two classes have the same methods but no common base class that declares them.
        return cast(postgresql.Insert, sqlite.insert(table))
    return postgresql.insert(table)
