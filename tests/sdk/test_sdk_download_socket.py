"""The connection of a download: block sizes, ends and encryption."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpcore
import pytest

from nekro_agent.downloads.download import fetch
from nekro_agent.downloads.socket import BLOCK_BYTES, GatheringStream
from nekro_agent.errors import DownloadError
from nekro_agent.testing import InMemoryRuntime

LOCAL = ("127.0.0.0/8",)
ASKED_BYTES = 64 << 10
CONTENT = hashlib.shake_256(b"a model").digest(3 * BLOCK_BYTES + 12_345)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[GatheringStream, socket.socket]]:
    """A stream and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = await GatheringStream.connect("127.0.0.1", server.getsockname()[1], timeout_seconds=10)
        other, _ = server.accept()
        with other:
            try:
                yield stream, other
            finally:
                await stream.aclose()


async def test_a_read_returns_available_bytes_up_to_the_limit() -> None:
    async with connected() as (stream, other):
        other.sendall(b"x" * 1000)
        assert await stream.read(600, 10) == b"x" * 600
        assert await stream.read(600, 10) == b"x" * 400


async def test_buffered_bytes_are_returned_in_larger_blocks_than_requested() -> None:
    async with connected() as (stream, other):
        stream.gather(is_body=True)
        sender = threading.Thread(target=other.sendall, args=(CONTENT,))
        sender.start()
        pieces = [await stream.read(ASKED_BYTES, 10)]
        while sum(map(len, pieces)) < len(CONTENT):
            pieces.append(await stream.read(ASKED_BYTES, 10))
        sender.join()
    assert b"".join(pieces) == CONTENT
    assert ASKED_BYTES < max(map(len, pieces)) <= BLOCK_BYTES


async def test_an_incomplete_block_is_returned_after_a_short_wait() -> None:
    async with connected() as (stream, other):
        stream.gather(is_body=True)
        for piece in (b"some", b"more"):
            other.sendall(piece)
            assert await stream.read(ASKED_BYTES, 30) == piece


async def test_end_and_reset_are_reported_while_buffering() -> None:
    async with connected() as (stream, other):
        stream.gather(is_body=True)
        other.sendall(b"last")
        other.shutdown(socket.SHUT_WR)
        assert [await stream.read(ASKED_BYTES, 10) for _ in range(2)] == [b"last", b""]
    async with connected() as (stream, other):
        stream.gather(is_body=True)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        other.close()  # with a reset
        with pytest.raises(httpcore.ReadError, match="reset"):
            await stream.read(ASKED_BYTES, 10)


@pytest.mark.parametrize("is_body", [False, True])
async def test_a_silent_connection_times_out(is_body: bool) -> None:
    async with connected() as (stream, _):
        stream.gather(is_body=is_body)
        with pytest.raises(httpcore.ReadTimeout):
            await stream.read(ASKED_BYTES, 0.01)


async def test_large_writes_reach_a_slow_reader_completely() -> None:
    async with connected() as (stream, other):
        received = bytearray()

        def read() -> None:
            while len(received) < len(CONTENT):
                received.extend(other.recv(5000))

        reader = threading.Thread(target=read)
        reader.start()
        await stream.write(CONTENT, 10)
        await asyncio.to_thread(reader.join)
    assert bytes(received) == CONTENT


async def test_socket_errors_are_mapped_to_those_of_httpcore() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(httpcore.ConnectError):
            await GatheringStream.connect("127.0.0.1", unused.getsockname()[1], timeout_seconds=10)
    async with connected() as (stream, other):
        other.close()
        await stream.aclose()
        assert stream.get_extra_info("is_readable") and stream.get_extra_info("nonsense") is None
        with pytest.raises(httpcore.ReadError):
            await stream.read(1, 10)
        with pytest.raises(httpcore.WriteError):
            await stream.write(b"x", 10)


Encrypted = Callable[[bytes], str]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of ``localhost``, with its key beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-out", str(path)]
    subprocess.run([*command, "-keyout", str(path.with_suffix(".key"))], check=True, capture_output=True)
    return path


@pytest.fixture
def encrypted(certificate: Path) -> Iterator[Encrypted]:
    """Answer each connection over TLS with fixed bytes, and close it; returns the URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server = socket.create_server(("127.0.0.1", 0))

    def serve(answer: bytes) -> None:
        with suppress(OSError):
            while True:
                plain, _ = server.accept()
                with suppress(OSError), context.wrap_socket(plain, server_side=True) as connection:
                    connection.recv(ASKED_BYTES)
                    connection.sendall(answer)

    def begin(answer: bytes) -> str:
        threading.Thread(target=serve, args=(answer,), daemon=True).start()
        return f"https://localhost:{server.getsockname()[1]}/model"

    yield begin
    server.close()


def answer_of(content: bytes, *, size: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode() + content


async def test_an_encrypted_download_arrives_whole(
    encrypted: Encrypted, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    url = encrypted(answer_of(CONTENT, size=len(CONTENT)))
    result = await fetch(url, tmp_path / "m", allow_private=LOCAL)
    assert result.path.read_bytes() == CONTENT


async def test_a_truncated_encrypted_download_is_an_error(
    world: InMemoryRuntime,
    encrypted: Encrypted,
    certificate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    url = encrypted(answer_of(CONTENT, size=len(CONTENT) + 1))
    with pytest.raises(DownloadError, match=f"broke off after {len(CONTENT)} bytes"):
        await fetch(url, tmp_path / "m", allow_private=LOCAL)


@pytest.mark.parametrize(("host", "trusted"), [("localhost", False), ("127.0.0.1", True)])
async def test_a_server_without_a_valid_certificate_is_refused(
    encrypted: Encrypted,
    certificate: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    trusted: bool,
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    url = encrypted(answer_of(CONTENT, size=len(CONTENT))).replace("localhost", host)
    with pytest.raises(DownloadError, match="certificate verify failed"):
        await fetch(url, tmp_path / "m", allow_private=LOCAL)


async def test_truncation_of_an_unfinished_file_is_detected(
    encrypted: Encrypted, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes were hashed on their way to the disk and are not read back."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    def cut(done: int, whole: Any) -> None:
        if done == whole:
            (part,) = tmp_path.glob(".m.*.part")
            with part.open("r+b") as file:
                file.truncate(1000)

    url = encrypted(answer_of(CONTENT, size=len(CONTENT)))
    with pytest.raises(DownloadError, match="was truncated by another process"):
        await fetch(url, tmp_path / "m", allow_private=LOCAL, progress=cut)
