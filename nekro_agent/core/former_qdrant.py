"""Names that plugins use and releases of qdrant-client since 1.16 lack: Nekro Agent installs 1.15.

``search`` finds the points that are nearest to a vector; ``vectors_count`` is a number of a collection.
"""

from __future__ import annotations

from typing import Any

__all__ = ["restore_names"]


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
