"""Fixtures for long work: a server that cuts and throttles."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from range_server import RangeServer, Serve
from worker_fleet import Fleet, build_fleet

PLUGINS = Path(__file__).parent / "long_plugins"


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a content; all servers stop at the end."""
    servers: list[RangeServer] = []

    def begin(content: object) -> RangeServer:
        servers.append(RangeServer(content))  # type: ignore[arg-type]
        return servers[-1]

    yield begin
    for server in servers:
        server.stop()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A directory on a file system of 8 MiB of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    directory = Path(tempfile.mkdtemp(prefix="small-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True).returncode:
        directory.rmdir()
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
        directory.rmdir()


@pytest.fixture(scope="module")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A migrated SQLite; what differs between databases is proved in tests/storage."""
    return f"sqlite:///{tmp_path_factory.mktemp('db') / 'nekro.db'}"


@pytest.fixture(scope="module")
def make_fleet(
    redis_server: Any, tmp_path_factory: pytest.TempPathFactory, database_url: str
) -> Iterator[Callable[..., Fleet]]:
    """Build fleets with the plugins of these tests on the session's Redis."""
    fleets: list[Fleet] = []

    def build(**overrides: Any) -> Fleet:
        directory = tmp_path_factory.mktemp("fleet")
        overrides = {"plugins": {"dirs": (PLUGINS,)}, **overrides}
        fleets.append(build_fleet(directory, redis_server.url, database_url, **overrides))
        return fleets[-1]

    yield build
    for fleet in fleets:
        fleet.stop()
