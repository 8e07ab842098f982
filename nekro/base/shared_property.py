"""A property that is computed once, also when several threads ask for it first at the same time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from threading import RLock
from typing import Any, TypeVar, overload

__all__ = ["shared_property"]

_Value = TypeVar("_Value")


class shared_property(cached_property[_Value]):
    """A ``cached_property`` for values that must not exist twice, such as a thread or a connection.

    Python's own has no lock since 3.12. The lock is one per property for all objects. A property may use
    others; two properties that use each other, asked for by two threads, would wait for ever, but one thread
    would recurse as well.
    """

    def __init__(self, func: Callable[[Any], _Value]) -> None:
        super().__init__(func)
        self._first_use = RLock()

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> shared_property[_Value]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> _Value: ...
    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        with self._first_use:
            return super().__get__(instance, owner)
