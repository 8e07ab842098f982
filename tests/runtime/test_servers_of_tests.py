"""Servers that tests start end with the process of the tests, also when that is killed."""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from pgbouncer_process import PGBOUNCER
from test_tied_processes import is_running
from waiting import WAIT_SECONDS, wait_until

TESTS = Path(__file__).parents[1]

BEGIN: Final = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}, {tests!r} + "/chaos"]
directory = Path({directory!r})
"""
END: Final = """
print(*pids, flush=True)
time.sleep(600)
"""
SERVERS: Final = {
    "redis": """
from redis_process import RedisServer
server = RedisServer(directory)
server.start()
pids = [server.process.pid]
""",
    "sentinels": """
from sentinel_group import SentinelGroup
group = SentinelGroup(directory)
group.__enter__()
pids = [process.pid for process in (*group._sentinels, *(one.process for one in group.servers))]
""",
    "postgres": """
from postgres_process import PostgresServer
running = PostgresServer.temporary()
server = running.__enter__()
pids = [int((Path(server._server.pgdata) / "postmaster.pid").read_text().split()[0])]
""",
    "pgbouncer": """
from pgbouncer_process import PgBouncer
from postgres_process import PostgresServer
running = PostgresServer.temporary()
server = running.__enter__()
pooler = PgBouncer(server.create_database())
pooler.__enter__()
pids = [pooler._process.pid]
""",
    "rabbitmq": """
from rabbit_server import RabbitServer
from redis_process import free_port
server = RabbitServer(directory, ports=(free_port(), free_port(), free_port()))
server.start()
pids = [server.process.pid, server._epmd.pid]
""",
}


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="nkkill", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.mark.extended
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_ends_with_a_killed_process_of_the_tests(name: str, directory: str) -> None:
    if (
        name == "rabbitmq"
        and runpy.run_path(str(TESTS / "chaos/rabbit_server.py"))["rabbit_binary"]() is None
    ):
        pytest.skip("RabbitMQ is not installed")
    if name == "pgbouncer" and PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    program = BEGIN.format(tests=str(TESTS), directory=directory) + SERVERS[name] + END
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS.parent) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids and all(is_running(pid) for pid in pids)
        parent.kill()
        parent.wait(WAIT_SECONDS)
        wait_until(lambda: not any(is_running(pid) for pid in pids), what="the servers to end")
