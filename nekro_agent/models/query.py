"""Queries with the interface that plugins use: ``Model.filter(…).order_by(…).limit(…)``, awaited."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any, Final, Generic, TypeVar

from nekro_agent.errors import InvalidValueError, NotFoundError

__all__ = ["Query", "Rows"]

T = TypeVar("T")

#: Loads rows; receives the equality filters and may apply some of them.
Rows = Callable[[dict[str, Any]], Awaitable[list[T]]]


def _contains(value: Any, part: Any) -> bool:
    return str(part) in str(value)


def _icontains(value: Any, part: Any) -> bool:
    return str(part).lower() in str(value).lower()


_LOOKUPS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
    "not": operator.ne,
    "in": lambda value, options: value in options,
    "not_in": lambda value, options: value not in options,
    "contains": _contains,
    "icontains": _icontains,
    "startswith": lambda value, part: str(value).startswith(str(part)),
    "endswith": lambda value, part: str(value).endswith(str(part)),
    "isnull": lambda value, wanted: (value is None) == bool(wanted),
    "not_isnull": lambda value, wanted: (value is not None) == bool(wanted),
}


class Query(Generic[T]):
    """A query that has not run; awaiting it returns the list of rows."""

    def __init__(self, name: str, fields: Iterable[str], rows: Rows[T]) -> None:
        self._name = name
        self._fields = frozenset(fields)
        self._rows = rows
        self._conditions: list[tuple[bool, dict[str, Any]]] = []
        self._order: tuple[str, ...] = ()
        self._limit: int | None = None
        self._offset = 0
        self._distinct = False

    def filter(self, **conditions: Any) -> Query[T]:
        """Keep rows that meet all conditions: ``name=value``, ``name__gte=value``, ``name__in=[…]``.

        Raises:
            InvalidValueError: a field or a comparison does not exist.
        """
        return self._with_condition(True, conditions)

    def exclude(self, **conditions: Any) -> Query[T]:
        """Drop rows that meet all conditions."""
        return self._with_condition(False, conditions)

    def order_by(self, *names: str) -> Query[T]:
        """Sort; ``-name`` sorts in descending order."""
        for name in names:
            self._checked_field(name.removeprefix("-"))
        return self._copy(_order=names)

    def limit(self, count: int) -> Query[T]:
        """Return at most ``count`` rows."""
        return self._copy(_limit=count)

    def offset(self, count: int) -> Query[T]:
        """Skip the first ``count`` rows."""
        return self._copy(_offset=count)

    def distinct(self) -> Query[T]:
        """Drop repeated results of ``values`` and ``values_list``."""
        return self._copy(_distinct=True)

    def all(self) -> Query[T]:
        """Return the query itself."""
        return self

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self._run().__await__()

    async def first(self) -> T | None:
        """Return the first row, or None."""
        rows = await self._run()
        return rows[0] if rows else None

    async def get(self) -> T:
        """Return the first row.

        Raises:
            NotFoundError: there is none.
        """
        row = await self.first()
        if row is None:
            raise NotFoundError(f"{self._name}: no row matches {self._conditions}")
        return row

    async def get_or_none(self) -> T | None:
        """Return the first row, or None."""
        return await self.first()

    async def update(self, **values: Any) -> int:
        """Set fields of the rows; returns their number.

        Raises:
            InvalidValueError: a field does not exist, or cannot be changed by plugins.
        """
        for name in values:
            self._checked_field(name)
        rows: list[Any] = list(await self._run())
        for row in rows:
            for name, value in values.items():
                setattr(row, name, value)
            await row.save()
        return len(rows)

    async def count(self) -> int:
        """Return the number of rows."""
        return len(await self._run())

    async def exists(self) -> bool:
        """Whether there is at least one row."""
        return await self.first() is not None

    async def delete(self) -> int:
        """Delete the rows; returns their number.

        Raises:
            InvalidValueError: rows of this model cannot be deleted.
        """
        rows: list[Any] = list(await self._run())
        for row in rows:
            await row.delete()
        return len(rows)

    async def values(self, *names: str) -> list[dict[str, Any]]:
        """Return the named fields of each row; all fields if none is named."""
        wanted = [self._checked_field(name) for name in names] or sorted(self._fields)
        return self._unique([{name: getattr(row, name) for name in wanted} for row in await self._run()])

    async def values_list(self, *names: str, flat: bool = False) -> list[Any]:
        """Return the named fields of each row as tuples; with ``flat`` the values of one field."""
        wanted = [self._checked_field(name) for name in names]
        rows = await self._run()
        if flat:
            return self._unique([getattr(row, wanted[0]) for row in rows])
        return self._unique([tuple(getattr(row, name) for name in wanted) for row in rows])

    async def _run(self) -> list[T]:
        equal: dict[str, Any] = {}
        for keep, conditions in self._conditions:
            if keep:
                equal |= conditions
        rows = [row for row in await self._rows(equal) if self._fits(row)]
        for name in reversed(self._order):
            rows.sort(key=operator.attrgetter(name.removeprefix("-")), reverse=name.startswith("-"))
        end = None if self._limit is None else self._offset + self._limit
        return rows[self._offset : end]

    def _fits(self, row: T) -> bool:
        return all(
            all(_meets(row, name, value) for name, value in conditions.items()) is keep
            for keep, conditions in self._conditions
        )

    def _unique(self, results: list[Any]) -> list[Any]:
        if not self._distinct:
            return results
        seen: list[Any] = []
        for result in results:
            if result not in seen:
                seen.append(result)
        return seen

    def _with_condition(self, keep: bool, conditions: dict[str, Any]) -> Query[T]:
        for name in conditions:
            field, _, lookup = name.partition("__")
            self._checked_field(field)
            if lookup and lookup not in _LOOKUPS:
                raise InvalidValueError(f"{self._name}: there is no comparison {lookup!r} (in {name})")
        return self._copy(_conditions=[*self._conditions, (keep, conditions)])

    def _checked_field(self, name: str) -> str:
        if name not in self._fields:
            known = ", ".join(sorted(self._fields))
            raise InvalidValueError(f"{self._name} has no field {name!r} here; it has {known}")
        return name

    def _copy(self, **changes: Any) -> Query[T]:
        copy = Query(self._name, self._fields, self._rows)
        copy.__dict__.update(self.__dict__ | changes)
        return copy


def _meets(row: object, name: str, wanted: Any) -> bool:
    field, _, lookup = name.partition("__")
    value = getattr(row, field)
    if isinstance(value, str) and type(wanted) is int:
        wanted = str(wanted)  # plugins pass ids as numbers too, such as sender_id=-1
    if not lookup:
        return bool(value == wanted)
    if value is None and lookup not in ("isnull", "not_isnull", "not", "in", "not_in"):
        return False
    return bool(_LOOKUPS[lookup](value, wanted))
