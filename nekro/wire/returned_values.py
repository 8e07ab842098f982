"""Encodes the return value of a plugin method for the sandbox.

Most values are plain and are written directly. Otherwise a copy with plain values is made and written;
if the copy still contains a class without a tagged form, the whole copy is pickled.
"""

from __future__ import annotations

import base64
import copy
import json
import operator
import pickle
from dataclasses import fields
from typing import Any, Final

from pydantic import BaseModel

from nekro.wire.returned_types import Shape, Treatment, is_of_standard_library, path_to, treatment_of
from nekro.wire.tagged import NotPlainError, TooLongError, write_text
from nekro_agent.errors import ResultError

__all__ = ["written"]

_PROTOCOL: Final = 4
_LEAVES: Final = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_MAX_REASON_CHARS: Final = 300


class _RefusedError(Exception):
    """Part of the value cannot be returned; ``written`` adds its location."""

    def __init__(self, found: object, reason: str) -> None:
        super().__init__(reason)
        self.found = found
        self.reason = reason


class _Sink:
    """Collects the parts of a pickle and counts their bytes; stores at most the limit."""

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


class _FallbackPickler(pickle.Pickler):
    """Pickles instances of any class except those that must stay on the worker."""

    #: The object that was pickled last; after an error, the object that failed.
    last: object = None

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        treatment = treatment_of(type(obj))
        if treatment.shape is Shape.KEPT:
            raise _kept(obj, treatment)
        return NotImplemented


class _Copier:
    """Copies a value with models, dataclasses and similar as plain values; preserves shared references."""

    def __init__(self) -> None:
        #: By id: the original, referenced so that its id is not reused, and its copy.
        self._copies: dict[int, tuple[object, object]] = {}

    def plain(self, value: Any) -> Any:
        """Return a plain value for ``value``; instances of foreign classes stay as they are.

        Raises:
            _RefusedError: part of the value cannot be returned.
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
                raise _RefusedError(value, f"cannot leave the worker: {treatment.words} is not a value")
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
                    key, f"cannot be a key: it becomes a {type(plain).__name__}; use a string"
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
        # model_dump would flatten a context or settings object before its class is checked.
        for name, field in type(value).model_fields.items():
            if not field.exclude:
                self.plain(getattr(value, name, None))
        self.plain(value.model_extra)
        try:
            plain = value.model_dump(warnings=False)
        except Exception as exc:
            raise _RefusedError(value, f"cannot be returned, its model_dump() fails: {exc}") from exc
        return self.plain(plain)


def written(value: object, *, max_bytes: int) -> bytes:
    """Write a value as tagged text; models, dataclasses and Enum members in it become plain values.

    Raises:
        ResultError: the value is too large, contains something that must stay on the worker, or cannot
            be pickled.
    """
    text, _ = _tagged(value, max_bytes)
    if text is None:
        text = _write_checked(value, max_bytes)
    if len(text) > max_bytes:
        raise _too_large(max_bytes)
    return text


def _tagged(value: object, max_bytes: int) -> tuple[bytes | None, str]:
    """Return the text, or None and the reason why there is no tagged form."""
    try:
        return write_text(value, max_bytes).encode(), ""
    except NotPlainError as exc:
        return None, str(exc)
    except TooLongError:
        return None, "it references the same large values repeatedly"
    except UnicodeEncodeError:
        return None, "a string is not valid Unicode (a lone surrogate?)"


def _write_checked(value: object, max_bytes: int) -> bytes:
    sink = _Sink(max_bytes)
    pickler = _FallbackPickler(sink, _PROTOCOL)
    try:
        plain = _Copier().plain(value)
        text, reason = _tagged(plain, max_bytes)
        if text is not None:
            return text
        pickler.dump(plain)
    except _RefusedError as exc:
        raise ResultError(f"{_located(exc.found, value)} {exc.reason}") from exc.__cause__
    except RecursionError:
        raise ResultError("the value is nested too deeply or contains itself; return a flat list") from None
    except Exception as exc:
        found = _located(pickler.last, value)
        words = str(exc)[:_MAX_REASON_CHARS]
        raise ResultError(
            f"{found} cannot be pickled: {words}; return plain values (dict, list, str, int, …)"
        ) from exc
    if sink.size > max_bytes:
        raise _too_large(max_bytes)
    content = base64.b64encode(b"".join(sink.parts)).decode("ascii")
    return json.dumps({"$pickle": [reason, content]}, separators=(",", ":")).encode()


def _too_large(max_bytes: int) -> ResultError:
    return ResultError(
        f"the value is too large: at most {max_bytes} bytes can be returned; write it to a file and return "
        "the file's path"
    )


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
