"""Fixtures for long work: a server that cuts and throttles."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from range_server import RangeServer, Serve


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
def database_url(tmp_path_factory: pytest.TempPathFactory, new_database: Callable[[str, Path], str]) -> str:
    """A migrated SQLite; what differs between databases is tested in tests/storage."""
    return new_database("sqlite", tmp_path_factory.mktemp("database"))


@pytest.fixture(scope="module")
def fleet_plugins() -> Path:
    """The plugins of these tests."""
    return Path(__file__).parent / "long_plugins"
