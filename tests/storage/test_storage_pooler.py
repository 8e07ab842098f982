"""A connection pooler between a worker and PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from broker_config.settings import DatabaseSettings
from nekro_agent.errors import StorageUnavailableError
from storage.engine import Database
from storage.schema import require_schema

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
CONFIG = """\
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
ignore_startup_parameters = extra_float_digits,options
"""

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")


@pytest.fixture
def pooled(
    migrated_copy: Callable[[str], DatabaseSettings], tmp_path: Path, unused_tcp_port: int
) -> Iterator[Callable[[str], DatabaseSettings]]:
    """Settings that lead through a pgbouncer with a given pool mode."""
    assert PGBOUNCER is not None
    direct, started = migrated_copy("postgres"), list[subprocess.Popen[bytes]]()
    directory = Path(tempfile.mkdtemp(prefix="pgbouncer"))  # other users cannot read below tmp_path
    directory.chmod(0o755)

    def start(mode: str) -> DatabaseSettings:
        parts: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(str(direct.url))
        config = directory / "pgbouncer.ini"
        config.write_text(
            CONFIG.format(
                host=parts["host"],
                port=parts.get("port", 5432),
                user=parts["user"],
                listen_port=unused_tcp_port,
                mode=mode,
            )
        )
        command = [str(PGBOUNCER), str(config)]
        if os.geteuid() == 0:  # it refuses to run as root
            command += ["--user", Path(parts["host"], f".s.PGSQL.{parts.get('port', 5432)}").owner()]
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, stderr=log))
        url = f"postgresql://{parts['user']}@127.0.0.1:{unused_tcp_port}/{parts['dbname']}?sslmode=disable"
        wait_until_it_answers(url, tmp_path / "log")
        return direct.model_copy(update={"url": url})

    yield start
    for process in started:
        process.terminate()
        process.wait()
    shutil.rmtree(directory)


def wait_until_it_answers(url: str, log: Path) -> None:
    give_up_at = time.monotonic() + 15
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as exc:
            if time.monotonic() > give_up_at:
                raise AssertionError(log.read_text()) from exc
            time.sleep(0.05)


async def test_transaction_pooling_is_refused_when_a_worker_starts(
    pooled: Callable[[str], DatabaseSettings], tmp_path: Path
) -> None:
    database = Database(pooled("transaction"), tmp_path)
    with pytest.raises(StorageUnavailableError, match="pool_mode=session"):
        await require_schema(database)
    await database.dispose()


async def test_session_pooling_is_accepted(pooled: Callable[[str], DatabaseSettings], tmp_path: Path) -> None:
    database = Database(pooled("session"), tmp_path)
    await require_schema(database)
    for _ in range(10):  # more often than psycopg runs a statement before it prepares it
        async with database.begin() as tx:
            await tx.chats.ensure("chat")
    await database.dispose()
