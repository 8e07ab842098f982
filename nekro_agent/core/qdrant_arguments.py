"""Dictionaries as arguments of Qdrant's local mode, which takes models only where a server takes both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

__all__ = ["with_models"]


def with_models(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a method of ``QdrantClient`` with models instead of dictionaries.

    Raises:
        ValidationError: a dictionary does not describe what the parameter accepts.
    """
    names = list(inspect.signature(method).parameters)[1:]  # without self
    return (
        [_with_models(method, name, value) for name, value in zip(names, args, strict=False)]
        + list(args[len(names) :]),
        {name: _with_models(method, name, value) for name, value in kwargs.items()},
    )


def _with_models(method: Callable[..., Any], name: str, value: Any) -> Any:
    adapter = _adapter(method, name) if _has_dictionary(value) else None
    return value if adapter is None else adapter.validate_python(value)


def _has_dictionary(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list | tuple) and any(map(_has_dictionary, value)))


@functools.lru_cache(maxsize=1024)
def _adapter(method: Callable[..., Any], name: str) -> TypeAdapter[Any] | None:
    """Return the reader of a parameter; None for one without a model, such as a payload."""
    from qdrant_client import QdrantClient

    # The ``search`` of older releases passes its options on to ``query_points``.
    hint = get_type_hints(method).get(name) or get_type_hints(QdrantClient.query_points).get(name)
    if hint is None or not _has_model(hint):
        return None
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def _has_model(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return True
    return any(map(_has_model, get_args(hint)))
