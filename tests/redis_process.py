"""A real redis-server for the tests, and how they wait for it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from waiting import WAIT_SECONDS, wait_until

from broker_config.embedded import redis_binary


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def use_server(path: Path) -> None:
    """Make this process and its children use this redis-server, not that on PATH or in the wheel."""
    directory = path.resolve(strict=True).parent
    os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ['PATH']}"


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
    ) -> None:
        self.directory = directory
        self.append_only = append_only
        self.options, self.password = options, password
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.process = subprocess.Popen(
            [
                redis_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
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
