"""The vector database of plugins: a Qdrant server, or an embedded database in the data directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from pydantic import BaseModel, Field

from nekro_agent import layout, runtime
from nekro_agent.core.config import config
from nekro_agent.core.former_qdrant import restore_names
from nekro_agent.core.logger import get_sub_logger
from nekro_agent.errors import PackageInstallError

__all__ = ["EmbeddedQdrant", "QdrantConfig", "get_qdrant_client", "get_qdrant_config"]

_log = get_sub_logger("vector_db")
#: How long an unused embedded database stays open, because opening it reads all vectors.
_IDLE_SECONDS: Final = 0.5
#: How long a busy process keeps the embedded database from the others.
_TURN_SECONDS: Final = 2.0


class QdrantConfig(BaseModel):
    """Address of the Qdrant server; ``url`` is ``""`` where the embedded database is used."""

    url: str
    api_key: str | None = Field(None, repr=False)


def get_qdrant_config() -> QdrantConfig:
    """Return the address of the Qdrant server, for plugins that connect themselves.

    Without a server, ``url`` is ``""`` and a warning names the setting: only ``get_qdrant_client`` can use
    the embedded database.
    """
    if not config.QDRANT_URL:
        _log.bind(fix="set NEKRO_QDRANT__URL").warning("qdrant_server_not_configured")
    with contextlib.suppress(ImportError):
        restore_names()
    return QdrantConfig(url=config.QDRANT_URL, api_key=config.QDRANT_API_KEY or None)


async def get_qdrant_client() -> Any:
    """Return the client: an ``AsyncQdrantClient``, or an object with its methods for the embedded database.

    Raises:
        PackageInstallError: the package ``qdrant-client`` is not installed.
    """
    try:
        from qdrant_client import AsyncQdrantClient
    except ImportError as exc:
        raise PackageInstallError(
            "get_qdrant_client needs the package qdrant-client: pip install 'nekro-workers[qdrant]'"
        ) from exc
    restore_names()
    if not config.QDRANT_URL:
        return _embedded(runtime.data_root())
    # Its connections belong to one event loop, and lane long has one per thread.
    loop = asyncio.get_running_loop()
    address = (config.QDRANT_URL, config.QDRANT_API_KEY)
    known = _clients.setdefault(loop, {})
    if address not in known:
        # The check of versions runs on a thread of its own and only logs.
        known[address] = AsyncQdrantClient(
            url=address[0], api_key=address[1] or None, check_compatibility=False
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

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._uses += 1
        if self._client is None:
            self._open()
        try:
            return getattr(self._client, name)(*args, **kwargs)
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
