"""``INSERT … ON CONFLICT``, which both databases have and SQLAlchemy spells twice."""

from __future__ import annotations

from typing import cast

from sqlalchemy.dialects import postgresql, sqlite

from storage.models import Base

__all__ = ["insert"]


def insert(dialect: str, model: type[Base]) -> postgresql.Insert:
    """Return the dialect's INSERT, which has ``on_conflict_do_update`` and ``on_conflict_do_nothing``.

    Args:
        dialect: ``sqlite`` or ``postgresql``.
    """
    if dialect == "sqlite":
        # The two classes have the same methods and no common base that names them.
        return cast(postgresql.Insert, sqlite.insert(model))
    return postgresql.insert(model)
