"""A pgbouncer between a test and PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from postgres_group import SERVER_USER
from redis_process import dying_with_parent, free_port
from waiting import WAIT_SECONDS, wait_until

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")

needs_pgbouncer = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")


class PgBouncer:
    """A pgbouncer on a loopback port, in front of one database; a context manager."""

    def __init__(self, database_url: str, *, mode: str = "transaction", **options: Any) -> None:
        """Start nothing yet.

        Args:
            database_url: of PostgreSQL itself.
            options: of the section ``[pgbouncer]``.
        """
        self._target: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(database_url)
        self._directory = Path(tempfile.mkdtemp(prefix="pgbouncer"))  # others cannot read below `tmp_path`
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self._options = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": mode,
            # Not the default of 15 s, so that tests with failing servers do not wait as long.
            "server_login_retry": 1,
            **options,
        }

    def url(self, **parameters: str) -> str:
        """URL of the database through the pooler, with these parameters."""
        query = urlencode({"sslmode": "disable", **parameters})
        return f"postgresql://{self._target['user']}@127.0.0.1:{self.port}/{self._target['dbname']}?{query}"

    def __enter__(self) -> PgBouncer:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def _start(self) -> None:
        assert PGBOUNCER is not None
        host, port = self._target["host"], self._target.get("port", 5432)
        lines = ["[databases]", f"* = host={host} port={port} user={self._target['user']}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in self._options.items()]
        config = self._directory / "pgbouncer.ini"
        config.write_text("\n".join(lines))
        self._directory.chmod(0o755)
        command = [*dying_with_parent(), PGBOUNCER, str(config)]
        if os.geteuid() == 0:  # it refuses to run as root
            socket = Path(host, f".s.PGSQL.{port}")
            user = socket.owner() if socket.exists() else SERVER_USER
            if command[0] == PGBOUNCER:
                command += ["--user", user]
            else:  # a process that changes its user does not die with its parent any more
                group = str(pwd.getpwnam(user).pw_gid)
                command[1:1] = ["--reuid", user, "--regid", group, "--init-groups"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log)
        wait_until(self._answers, what=lambda: f"pgbouncer to answer\n{self._log.read_text()}")

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WAIT_SECONDS)
        shutil.rmtree(self._directory)
