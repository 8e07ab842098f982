"""Shared base of the query models."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel

from nekro_agent.models.query import Query

__all__ = ["MAX_ROWS", "QueryModel"]

#: Most rows that one query reads, newest first; these models are meant for look-ups, not for reports.
MAX_ROWS = 10_000


class QueryModel(BaseModel):
    """Read access to one of our tables, with the interface of the reference's models."""

    _extra_fields: ClassVar[tuple[str, ...]] = ()

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        """Return the rows; ``equal`` contains the conditions that may narrow the query."""
        raise NotImplementedError

    @classmethod
    def query(cls) -> Query[Self]:
        """Return a query of all rows."""
        return Query(cls.__name__, (*cls.model_fields, *cls._extra_fields), cls._load)

    @classmethod
    def filter(cls, **conditions: Any) -> Query[Self]:
        """Return a query of the rows that meet all conditions."""
        return cls.query().filter(**conditions)

    @classmethod
    def exclude(cls, **conditions: Any) -> Query[Self]:
        """Return a query of the rows that do not meet the conditions."""
        return cls.query().exclude(**conditions)

    @classmethod
    def all(cls) -> Query[Self]:
        """Return a query of all rows."""
        return cls.query()

    @classmethod
    async def get_or_none(cls, **conditions: Any) -> Self | None:
        """Return a row that meets all conditions, or None."""
        return await cls.filter(**conditions).first()

    @classmethod
    async def get(cls, **conditions: Any) -> Self:
        """Return a row that meets all conditions.

        Raises:
            NotFoundError: there is none.
        """
        return await cls.filter(**conditions).get()
