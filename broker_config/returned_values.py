"""Pickles what a plugin method returned, so that a sandbox can open it.

Most values are plain: one pass of the C pickler writes them, and asks about each class that it
meets. When one has to be taken apart, a copy of plain values is made and pickled instead.
"""

from __future__ import annotations

import copy
import operator
import pickle
from dataclasses import fields
from typing import Any, Final

from pydantic import BaseModel

from broker_config.returned_types import Shape, Treatment, is_of_standard_library, treatment_of
from broker_config.value_paths import path_to
from nekro_agent.errors import ResultError

__all__ = ["pickled"]

_PROTOCOL: Final = 4
_LEAVES: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_MAX_REASON_CHARS: Final = 300


class _NotPlainError(Exception):
    """The value holds something that has to be taken apart first."""


class _RefusedError(Exception):
    """Something in the value cannot cross; ``pickled`` adds where it is."""

    def __init__(self, found: object, reason: str) -> None:
        super().__init__(reason)
        self.found = found
        self.reason = reason


class _Sink:
    """Takes a pickle's parts and counts them; keeps no more than the limit."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self.parts: list[bytes] = []
        self._limit = limit

    def write(self, part: Any) -> int:
        size = len(part)
        self.size += size
        if self.size <= self._limit:
            self.parts.append(bytes(part))
        else:
            self.parts.clear()
        return size


class _PlainPickler(pickle.Pickler):
    """Gives up at the first object that has to be taken apart; plain builtins it never asks about."""

    def reducer_override(self, obj: Any) -> Any:
        shape = treatment_of(type(obj)).shape
        if shape is Shape.WHOLE or shape is Shape.REFILLED:
            return NotImplemented
        # How values of the standard library are pickled names its functions and classes.
        if shape is Shape.CODE and is_of_standard_library(getattr(obj, "__module__", None)):
            return NotImplemented
        raise _NotPlainError


class _AnyPickler(pickle.Pickler):
    """Pickles instances of any class, but nothing that must stay on the worker."""

    #: The object that was met last: at an error, the one that failed.
    last: object = None

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        treatment = treatment_of(type(obj))
        if treatment.shape is Shape.KEPT:
            raise _kept(obj, treatment)
        return NotImplemented


class _Copier:
    """Copies a value with models, dataclasses and the like as plain values; keeps what is shared shared."""

    def __init__(self) -> None:
        #: By id: the original, which keeps its id, and its copy.
        self._copies: dict[int, tuple[object, object]] = {}

    def plain(self, value: Any) -> Any:
        """Return a plain value for ``value``; instances of foreign classes stay.

        Raises:
            _RefusedError: something in it cannot cross.
        """
        cls = type(value)
        if cls in _LEAVES:
            return value
        known = self._copies.get(id(value))
        if known is not None:
            return known[1]
        treatment = treatment_of(cls)
        match treatment.shape:
            case Shape.REFILLED:
                return self._refilled(value)
            case Shape.MODEL:
                return self._keep(value, self._model(value))
            case Shape.DATACLASS:
                return self._dataclass(value)
            case Shape.MEMBER:
                return self.plain(value.value)
            case Shape.CAST | Shape.SUBCLASS if treatment.cast is not None:
                return self._keep(value, self.plain(treatment.cast(value)))
            case Shape.KEPT:
                raise _kept(value, treatment)
            case Shape.CODE if not is_of_standard_library(getattr(value, "__module__", None)):
                raise _RefusedError(value, f"cannot leave the worker: {treatment.words} is no value")
        return value

    def _keep(self, value: object, plain: Any) -> Any:
        self._copies[id(value)] = (value, plain)
        return plain

    def _refilled(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._mapping(value)
        if isinstance(value, tuple | set | frozenset):
            return self._keep(value, self._fixed(value))
        items = self._keep(value, _emptied(value))
        items.extend(map(self.plain, value))
        return items

    def _mapping(self, value: dict[Any, Any]) -> Any:
        mapping = self._keep(value, _emptied(value))
        for key, item in value.items():
            plain = self.plain(key)
            try:
                mapping[plain] = self.plain(item)
            except TypeError:
                raise _RefusedError(
                    key, f"cannot be a key: it becomes a {type(plain).__name__}; use a text"
                ) from None
        return mapping

    def _fixed(self, value: Any) -> Any:
        """Copy a tuple or set; a set whose members become dicts or lists becomes a list."""
        items = [self.plain(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        if isinstance(value, tuple):
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        try:
            return type(value)(items)
        except TypeError:
            return items

    def _dataclass(self, value: Any) -> dict[str, Any]:
        plain: dict[str, Any] = self._keep(value, {})
        for field in fields(value):
            if hasattr(value, field.name):
                plain[field.name] = self.plain(getattr(value, field.name))
        return plain

    def _model(self, value: BaseModel) -> Any:
        # model_dump would flatten a context or settings before anyone could see their class.
        for name, field in type(value).model_fields.items():
            if not field.exclude:
                self.plain(getattr(value, name, None))
        self.plain(value.model_extra)
        try:
            plain = value.model_dump(warnings=False)
        except Exception as exc:
            raise _RefusedError(value, f"cannot be returned, its model_dump() fails: {exc}") from exc
        return self.plain(plain)


def pickled(value: object, *, max_bytes: int) -> bytes:
    """Pickle a value; models, dataclasses and Enum members in it become plain values.

    Raises:
        ResultError: it is too large, holds what must stay on the worker, or cannot be pickled.
    """
    sink = _Sink(max_bytes)
    try:
        _PlainPickler(sink, _PROTOCOL).dump(value)
    except Exception:
        # Whatever it was, the careful way knows what is wrong, and where.
        sink = _Sink(max_bytes)
        _dump_carefully(value, sink)
    if sink.size > max_bytes:
        raise ResultError(
            f"the value has {sink.size} bytes pickled, at most {max_bytes} can be returned "
            "(NEKRO_SANDBOX__RETURN_BYTES); write it to a file and return the file's path"
        )
    return b"".join(sink.parts)


def _dump_carefully(value: object, sink: _Sink) -> None:
    pickler = _AnyPickler(sink, _PROTOCOL)
    try:
        pickler.dump(_Copier().plain(value))
    except _RefusedError as exc:
        raise ResultError(f"{_located(exc.found, value)} {exc.reason}") from exc.__cause__
    except RecursionError:
        raise ResultError("the value is nested too deep, or holds itself; return a flat list") from None
    except Exception as exc:
        found = _located(pickler.last, value)
        reason = str(exc)[:_MAX_REASON_CHARS]
        raise ResultError(
            f"{found} cannot be pickled: {reason}; return plain values (dict, list, str, int, …)"
        ) from exc


def _emptied(value: Any) -> Any:
    """Return an empty container of the same class and options (a deque's length)."""
    if type(value) is list or type(value) is dict:
        return type(value)()
    container = copy.copy(value)
    container.clear()
    return container


def _kept(found: object, treatment: Treatment) -> _RefusedError:
    return _RefusedError(found, f"cannot leave the worker: it is {treatment.words}")


def _located(found: object, value: object) -> str:
    name = f"class {found.__name__}" if isinstance(found, type) else type(found).__name__
    return f"{path_to(found, value)} ({name})"
