"""What plugins use of qdrant-client that its newer releases or its local mode lack.

Nekro Agent installs release 1.15. Releases since 1.16 lack ``search``, which finds the points that are
nearest to a vector, and ``vectors_count``, a number of a collection. Local mode takes models only where a
server takes dictionaries too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

__all__ = [
    "restore_names",
    "with_models",
]


def restore_names() -> None:
    """Give the classes of qdrant-client these names, unless it has them."""
    from qdrant_client import AsyncQdrantClient, QdrantClient, models

    for owner, name, value in (
        (AsyncQdrantClient, "search", _search_async),
        (QdrantClient, "search", _search),
        # Collections of plugins have one vector for each point.
        (models.CollectionInfo, "vectors_count", property(lambda info: info.points_count)),
    ):
        if not hasattr(owner, name) and name not in getattr(owner, "model_fields", ()):
            setattr(owner, name, value)


def _search(
    self: Any, collection_name: str, query_vector: Any, append_payload: bool = True, **options: Any
) -> list[Any]:
    """Return the points that are nearest to a vector; the options are those of ``query_points``."""
    found: list[Any] = self.query_points(collection_name, **_query(query_vector), **options).points
    return found


async def _search_async(
    self: Any, collection_name: str, query_vector: Any, append_payload: bool = True, **options: Any
) -> list[Any]:
    """Return the points that are nearest to a vector; the options are those of ``query_points``."""
    found: list[Any] = (await self.query_points(collection_name, **_query(query_vector), **options)).points
    return found


def _query(vector: Any) -> dict[str, Any]:
    """Return a vector, or one with its name in the collection, as ``query_points`` takes it."""
    if isinstance(vector, tuple) and len(vector) == 2 and isinstance(vector[0], str):
        return {"using": vector[0], "query": vector[1]}
    if hasattr(vector, "name") and hasattr(vector, "vector"):  # NamedVector, NamedSparseVector
        return {"using": vector.name, "query": vector.vector}
    return {"query": list(vector) if isinstance(vector, tuple) else vector}


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
