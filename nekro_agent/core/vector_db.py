"""The vector database of plugins: a Qdrant server, or an embedded database in the data directory.

Nekro Agent installs release 1.15 of qdrant-client. Releases since 1.16 lack ``search``, which finds the
points that are nearest to a vector, and ``vectors_count``, a number of a collection; both are restored. Local
mode takes models only where a server takes dictionaries too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from nekro_agent import layout, runtime
from nekro_agent.core.config import config
from nekro_agent.errors import PackageInstallError, SettingsError

__all__ = [
    "EmbeddedQdrant",
    "QdrantConfig",
    "get_qdrant_client",
    "get_qdrant_config",
]

#: How long an unused embedded database stays open, because opening it reads all vectors.
_IDLE_SECONDS: Final = 0.5
#: Largest answer of a server: points with their vectors.
_MOST_ANSWER_BYTES: Final = 512 << 20
#: How long a busy process keeps the embedded database from the others.
_TURN_SECONDS: Final = 2.0


class QdrantConfig(BaseModel):
    """Address of the Qdrant server."""

    url: str
    api_key: str | None = Field(None, repr=False)


def get_qdrant_config() -> QdrantConfig:
    """Return the address of the Qdrant server, for plugins that connect themselves.

    Raises:
        SettingsError: no server is configured. An empty address would let libraries store the data elsewhere,
            such as in a temporary folder.
    """
    if not config.QDRANT_URL:
        raise SettingsError(
            "get_qdrant_config: no Qdrant server is configured; set NEKRO_QDRANT__URL to its address, "
            "such as http://127.0.0.1:6333. Only get_qdrant_client can use the embedded database"
        )
    with contextlib.suppress(ImportError):
        _restore_names()
    return QdrantConfig(url=config.QDRANT_URL, api_key=config.QDRANT_API_KEY or None)


async def get_qdrant_client() -> Any:
    """Return the client: an ``AsyncQdrantClient``, or an object with its methods for the embedded database.

    Raises:
        PackageInstallError: the package ``qdrant-client`` is not installed.
        SettingsError: no server is configured, and hosts share no disk for the embedded database.
    """
    if not config.QDRANT_URL and runtime.is_bound() and runtime.current().areas.is_synced:
        raise SettingsError(
            "get_qdrant_client: hosts that share no disk (NEKRO_FILES__URL) cannot share the embedded "
            "database; set NEKRO_QDRANT__URL to the address of a Qdrant server"
        )
    try:
        from qdrant_client import AsyncQdrantClient
    except ImportError as exc:
        raise PackageInstallError(
            "get_qdrant_client needs the package qdrant-client: pip install 'nekro-workers[qdrant]'"
        ) from exc
    from nekro_client.answer_limits import limited

    _restore_names()
    if not config.QDRANT_URL:
        return _embedded(runtime.data_root())
    # Its connections belong to one event loop, and lane long has one per thread.
    loop = asyncio.get_running_loop()
    address = (config.QDRANT_URL, config.QDRANT_API_KEY)
    known = _clients.setdefault(loop, {})
    if address not in known:
        # The check of versions runs on a thread of its own and only logs.
        known[address] = AsyncQdrantClient(
            url=address[0],
            api_key=address[1] or None,
            check_compatibility=False,
            event_hooks=limited(_MOST_ANSWER_BYTES),
        )
    return known[address]


class EmbeddedQdrant:
    """Qdrant's local mode with the methods of ``AsyncQdrantClient``.

    Local mode allows one process at a time and blocks its caller. The methods therefore run on a thread, and
    the processes of a host take turns: each opens the database for a series of operations and closes it soon.
    It is meant for small collections, since opening it reads all vectors.
    """

    def __init__(self, root: Path) -> None:
        """Use the database of a data root, which is created at the first operation."""
        self._directory = root / "qdrant"
        self._lock_file = layout.locks_dir(root) / "qdrant.lock"
        # One thread: operations of this process exclude each other.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="qdrant")
        self._client: Any = None
        self._lock: int | None = None
        self._opened_at = 0.0
        self._uses = 0
        # Otherwise the client closes itself while the interpreter dismantles what it needs for that. The
        # thread has ended by then.
        atexit.register(self._close)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from qdrant_client import QdrantClient

        if name.startswith("_") or not callable(getattr(QdrantClient, name, None)):
            raise AttributeError(f"AsyncQdrantClient has no method {name!r}")

        async def operation(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(self._thread.submit(self._run, name, args, kwargs))

        return operation

    async def close(self, **unused: object) -> None:
        """Close the database until the next operation."""
        await asyncio.wrap_future(self._thread.submit(self._close))

    def _run(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._uses += 1
        if self._client is None:
            self._open()
        try:
            method = getattr(type(self._client), name)
            args, kwargs = _with_models(method, args, kwargs)
            return method(self._client, *args, **kwargs)
        finally:
            if time.monotonic() - self._opened_at > _TURN_SECONDS:
                self._close()
            else:
                idle = threading.Timer(_IDLE_SECONDS, self._close_idle, (self._uses,))
                idle.daemon = True
                idle.start()

    def _open(self) -> None:
        from qdrant_client import QdrantClient

        for directory in (self._directory, self._lock_file.parent):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._client = QdrantClient(path=str(self._directory), force_disable_check_same_thread=True)
        except BaseException:
            os.close(lock)
            raise
        self._lock, self._opened_at = lock, time.monotonic()

    def _close(self) -> None:
        client, lock, self._client, self._lock = self._client, self._lock, None, None
        try:
            if client is not None:
                client.close()
        finally:
            if lock is not None:
                os.close(lock)

    def _close_idle(self, uses: int) -> None:
        """Close the database if nothing has used it since; runs on the timer's thread."""
        try:
            self._thread.submit(lambda: self._close() if self._uses == uses else None)
        except RuntimeError:  # the interpreter is ending, which closes everything
            return


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Any]] = WeakKeyDictionary()

_databases: dict[Path, EmbeddedQdrant] = {}


def _embedded(root: Path) -> EmbeddedQdrant:
    return _databases.setdefault(root, EmbeddedQdrant(root))


def _restore_names() -> None:
    """Give the classes of qdrant-client ``search`` and ``vectors_count``, unless they have them."""
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


def _with_models(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a method of ``QdrantClient`` with models instead of dictionaries.

    Raises:
        ValidationError: a dictionary does not describe what the parameter accepts.
    """
    names = list(inspect.signature(method).parameters)[1:]  # without self
    return (
        [_with_model(method, name, value) for name, value in zip(names, args, strict=False)]
        + list(args[len(names) :]),
        {name: _with_model(method, name, value) for name, value in kwargs.items()},
    )


def _with_model(method: Callable[..., Any], name: str, value: Any) -> Any:
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
