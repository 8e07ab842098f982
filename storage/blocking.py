"""Reading from code that cannot await: a few functions of the plugin API are ordinary ones.

Reading only. A blocking write on an event loop's thread could wait for a transaction of the same
loop, which cannot go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, CursorResult, Dialect, Executable

from broker_config.settings import DatabaseSettings
from storage import postgresql, sqlite
from storage.transaction import Repositories
from storage.urls import async_url, sync_url

__all__ = ["BlockingReader"]

_Result = TypeVar("_Result")


class BlockingReader:
    """The repositories on a blocking connection; usable from any thread.

    Neither database lets a reader wait for a writer, so an answer takes about a millisecond.
    """

    def __init__(self, settings: DatabaseSettings, data_dir: Path) -> None:
        url = async_url(settings, data_dir)
        create = sqlite.create_sync if url.get_backend_name() == "sqlite" else postgresql.create_sync
        self._engine = create(sync_url(url), settings, pooled=True)

    def read(self, query: Callable[[Repositories], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run a query of the repositories, such as ``lambda r: r.jobs.find(job_id)``.

        Raises:
            StorageUnavailableError: the database does not answer.
        """
        with self._engine.connect() as connection:
            return _run(query(Repositories(_Blocking(connection))))

    def dispose(self) -> None:
        """Close the connections."""
        self._engine.dispose()


class _Blocking:
    """A blocking connection behind the repositories' ``await``s, which never suspend on it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def dialect(self) -> Dialect:
        return self._connection.dialect

    async def execute(
        self, statement: Executable, parameters: Mapping[str, Any] | None = None, /
    ) -> CursorResult[*tuple[Any, ...]]:
        return self._connection.execute(statement, parameters)


def _run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine that awaits nothing but ``_Blocking``."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: _Result = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking query must await nothing but the repositories")
