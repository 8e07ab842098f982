"""Shared base of the query models."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from nekro_agent.errors import InvalidValueError
from nekro_agent.models.query import Query

__all__ = ["MAX_ROWS", "QueryModel", "aware", "stable_id"]

#: Most rows that one query reads, newest first; these models are meant for look-ups, not for reports.
MAX_ROWS = 10_000


class QueryModel(BaseModel):
    """Access to one of our tables, with the interface of the reference's models.

    ``save`` writes the fields that were changed since the row was read, and no others, so that two
    processes that change different fields of a row do not undo each other's changes.
    """

    # Plugins pass ids as numbers too, such as ``sender_id=-1``.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    _extra_fields: ClassVar[tuple[str, ...]] = ()
    #: Names in the record, of fields that it has under another name.
    _record_names: ClassVar[dict[str, str]] = {"create_time": "created_at", "update_time": "updated_at"}
    #: Fields that plugins may change.
    _changeable: ClassVar[frozenset[str]] = frozenset()

    #: The changeable fields as stored; None for an object that is not stored.
    _stored: dict[str, Any] | None = PrivateAttr(None)

    @classmethod
    async def _load(cls, equal: dict[str, Any]) -> list[Self]:
        """Return the rows; ``equal`` contains the conditions that may narrow the query."""
        raise NotImplementedError

    async def _insert(self) -> Self:
        """Store this object as a new row; returns the row."""
        raise InvalidValueError(f"{type(self).__name__}: plugins cannot create rows")

    async def _update(self, changes: dict[str, Any]) -> None:
        """Write changed fields."""
        raise NotImplementedError

    async def _remove(self) -> bool:
        """Delete the row; False if there is none."""
        raise InvalidValueError(f"{type(self).__name__}: rows cannot be deleted by plugins")

    @classmethod
    def _row(cls, **values: Any) -> Self:
        """Return a stored row."""
        row = cls(**values)
        row._keep()
        return row

    @classmethod
    def _of(cls, record: Any, **others: Any) -> Self:
        """Return the row of a record: ``others``, and the fields that the record has."""
        names = {name: cls._record_names.get(name, name) for name in cls.model_fields if name not in others}
        same = {name: getattr(record, own) for name, own in names.items() if hasattr(record, own)}
        return cls._row(**same, **others)

    def _keep(self) -> None:
        self._stored = {name: copy.deepcopy(getattr(self, name)) for name in type(self).model_fields}

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
    async def first(cls) -> Self | None:
        """Return the first row, or None."""
        return await cls.query().first()

    @classmethod
    async def exists(cls, **conditions: Any) -> bool:
        """Whether a row meets all conditions."""
        return await cls.filter(**conditions).exists()

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

    @classmethod
    async def create(cls, **values: Any) -> Self:
        """Store a new row and return it.

        Raises:
            InvalidValueError: a field does not exist or its value is invalid.
        """
        unknown = sorted(values.keys() - cls.model_fields.keys())
        if unknown:
            raise InvalidValueError(f"{cls.__name__} has no field {unknown[0]!r} here")
        try:
            row = cls(**values)
        except ValidationError as exc:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
            raise InvalidValueError(f"{cls.__name__}: {faults}") from exc
        return await row._insert()

    @classmethod
    async def get_or_create(
        cls, defaults: Mapping[str, Any] | None = None, **conditions: Any
    ) -> tuple[Self, bool]:
        """Return the row that meets the conditions, or create it with ``defaults``; True if it is new."""
        row = await cls.get_or_none(**conditions)
        if row is not None:
            return row, False
        return await cls.create(**{**conditions, **(defaults or {})}), True

    @classmethod
    async def update_or_create(
        cls, defaults: Mapping[str, Any] | None = None, **conditions: Any
    ) -> tuple[Self, bool]:
        """Set ``defaults`` on the row that meets the conditions, or create it; True if it is new."""
        row = await cls.get_or_none(**conditions)
        if row is None:
            return await cls.create(**{**conditions, **(defaults or {})}), True
        for name, value in (defaults or {}).items():
            setattr(row, name, value)
        await row.save()
        return row, False

    async def save(self, update_fields: Iterable[str] | None = None, **unused: object) -> None:
        """Write the fields that were changed since the row was read; store an object that is not stored.

        Args:
            update_fields: only these; None means all.
            unused: options of the reference that have no counterpart.

        Raises:
            InvalidValueError: a changed field cannot be stored here.
        """
        if self._stored is None:
            created = await self._insert()
            self.__dict__.update(created.__dict__)
            self._stored = created._stored
            return
        names = set(type(self).model_fields if update_fields is None else update_fields)
        changes = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in names and getattr(self, name) != self._stored[name]
        }
        fixed = sorted(changes.keys() - self._changeable)
        if fixed:
            raise InvalidValueError(
                f"{type(self).__name__}.{fixed[0]} cannot be changed here; plugins may change "
                f"{', '.join(sorted(self._changeable)) or 'no field'}"
            )
        if changes:
            await self._update(changes)
            self._stored |= copy.deepcopy(changes)

    async def delete(self) -> None:
        """Delete this row; no effect if it is gone."""
        await self._remove()


def aware(value: Any) -> Any:
    """Return a naive time as UTC, as the reference reads it; any other value unchanged."""
    if isinstance(value, datetime) and value.tzinfo is None:
        return value.replace(tzinfo=UTC)
    return value


def stable_id(*keys: str) -> int:
    """Return the ``id`` of a row that is stored under texts: 53 bits of their SHA-256."""
    joined = b"".join(len(key).to_bytes(4, "big") + key.encode("utf-8", "surrogatepass") for key in keys)
    return int.from_bytes(hashlib.sha256(joined).digest()[:7], "big") >> 3
