"""Stores of objects of every kind: a directory, and two servers of S3 over HTTP."""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from faulty_store import FaultyStore
from s3_process import BUCKET, S3Server, variables_of

from storage.files.stores.opening import open_store
from storage.files.stores.store import ObjectStore


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], S3Server]]:
    """Return the server of a kind, ``moto`` or ``rclone``; tests isolate themselves by prefix."""
    started: list[S3Server] = []

    @functools.cache
    def start(kind: str) -> S3Server:
        server = S3Server(kind, tmp_path_factory.mktemp(kind))
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(params=["directory", "moto", "rclone"])
def store_url(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    s3_server: Callable[[str], S3Server],
) -> str:
    """URL of an empty store of each kind."""
    if request.param == "directory":
        return f"file://{tmp_path / 'objects'}"
    for name, value in s3_server(request.param).variables.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/files"


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    """An empty store of each kind."""
    return open_store(store_url)


@pytest.fixture(params=["moto", "rclone"])
async def faulty(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, s3_server: Callable[[str], S3Server]
) -> AsyncIterator[FaultyStore]:
    """A proxy in front of each server of S3, which clients of this process use."""
    server = s3_server(request.param)
    async with FaultyStore(server.port) as proxy:
        for name, value in variables_of(f"http://127.0.0.1:{proxy.port}").items():
            monkeypatch.setenv(name, value)
        yield proxy
