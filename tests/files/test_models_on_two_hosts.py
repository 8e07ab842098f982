"""Models on two hosts that share no disk: brought from the store, and stored once for all that have them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from two_hosts import TwoHosts, two_hosts
from waiting import WAIT_SECONDS

from benchmarks.downloads import Served, make_file, serving
from nekro.app import use_cases
from nekro.app.services import Services
from nekro.wire.values import decode_value

#: More than one part.
SIZE = 20 << 20


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, redis_server: Any) -> Iterator[TwoHosts]:
    directory = tmp_path_factory.mktemp("hosts")
    store_url = f"file://{directory / 'objects'}"
    downloads = {"allow_private": ("127.0.0.0/8",)}
    with two_hosts(directory, redis_server.url, store_url, {}, downloads=downloads) as hosts:
        hosts.start("a", "long")  # runs `download_model`
        hosts.start("b", "methods")
        yield hosts


@pytest.fixture
async def services(hosts: TwoHosts) -> AsyncIterator[Services]:
    services = hosts.services()
    await services.start()
    yield services
    await services.close()


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[Served, str]]:
    sha256 = make_file(tmp_path / "source", SIZE)
    with serving(tmp_path / "source") as served:
        yield served, sha256


async def call(services: Services, method: str, *args: object) -> Any:
    """Call a method in a chat of its own."""
    envelope = await use_cases.invoke(
        services,
        method,
        args,
        {},
        chat_key=f"test-{uuid.uuid4().hex}",
        user_id=None,
        timeout_seconds=WAIT_SECONDS,
    )
    return decode_value(envelope.value_bytes(), max_bytes=1 << 20)


def stored_bytes(hosts: TwoHosts) -> int:
    objects = hosts.data_dirs["a"].parent / "objects"
    return sum(path.stat().st_size for path in objects.rglob("*") if path.is_file())


def digests(root: Path) -> list[str]:
    """SHA-256 of the files of plugins and chats that a host has."""
    files = (path for path in root.rglob("*") if path.is_file() and path.stat().st_size == SIZE)
    used = (path for path in files if "cache" not in path.parts)
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in used]


async def test_a_model_is_brought_to_a_host_that_lacks_it_and_stored_once_for_chats_and_plugins(
    hosts: TwoHosts, services: Services, model: tuple[Served, str]
) -> None:
    server, sha256 = model
    await call(services, "download_model", server.url, "m")
    assert digests(hosts.data_dirs["a"]) == [sha256]
    assert digests(hosts.data_dirs["b"]) == []

    loaded = await call(services, "load_model", "m")
    assert loaded["sha256"] == sha256
    assert digests(hosts.data_dirs["b"]) == [sha256]
    assert "already here" in await call(services, "download_model", server.url, "m")
    assert len(server.starts) == 1

    once = stored_bytes(hosts)
    assert once < SIZE + (1 << 20)
    # Another plugin that knows the digest fetches nothing, and what two chats fetch is not stored again.
    assert await call(services, "keep_own", server.url, sha256) == sha256
    assert len(server.starts) == 1
    for _ in range(2):
        assert await call(services, "keep_shared", server.url) == sha256
    assert len(server.starts) == 3
    assert digests(hosts.data_dirs["b"]) == [sha256] * 4
    assert stored_bytes(hosts) - once < 1 << 20
