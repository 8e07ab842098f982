"""Start the Redis server of a run: on loopback, without persistence."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.harness.processes import Child, free_port
from broker_config.embedded import redis_binary
from broker_config.redis_endpoint import server_version

__all__ = ["RedisServer", "redis_server", "redis_version"]

_START_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """A running server."""

    url: str
    version: str
    binary: str
    pid: int

    def clear(self) -> None:
        """Delete every key; only this run uses the server."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """Run a server without persistence on a free loopback port."""
    port = free_port()
    binary = redis_binary()
    # fmt: off
    command = [
        binary, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory),
        "--save", "", "--appendonly", "no", "--loglevel", "warning",
    ]
    # fmt: on
    with Child(command, log=directory / "redis.log") as child:
        url = f"redis://127.0.0.1:{port}/0"
        yield RedisServer(url=url, version=_wait_for_version(url, child), binary=binary, pid=child.pid)


def _wait_for_version(url: str, child: Child) -> str:
    deadline = time.monotonic() + _START_SECONDS
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < deadline and child.ended() is None:
            try:
                return server_version(client.info("server"))
            except redis.ConnectionError:
                time.sleep(0.01)
    raise RuntimeError(f"redis-server did not start: {child.last_words() or 'no words in its log'}")


def redis_version() -> str:
    """Return name and version of the server that ``redis_server`` runs."""
    said = subprocess.run([redis_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.match(r"(\w+) server v=(\S+)", said)
    return " ".join(found.groups()) if found else "unknown"
