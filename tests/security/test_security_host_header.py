"""Ports on loopback: neither web sites whose name resolves to this machine nor its other users read them."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from redis_process import free_port
from waiting import WAIT_SECONDS, wait_until

from broker_config.secret_files import monitoring_key, secret_path
from broker_config.settings import Settings
from nekro.app.http_server import AllowedHosts, PageResponse, PageServer, is_loopback
from nekro.cli.environment import environment_of

pytestmark = pytest.mark.extended

OUR_NAMES = ("localhost", "LOCALHOST.", "127.0.0.1", "127.0.0.1:{port}", "[::1]:{port}", "[0:0:0:0:0:0:0:1]")
OTHERS = (
    "evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "",
    "127.0.0.1, evil.example", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "[::1]evil.example", "::1",
    "127.1", "127.0.0.2", "127.0.0.1:80:90", "[::ffff:7f00:1]", "[fe80::1%25lo]",
    " ", "localhost\t.evil.example",
)  # fmt: skip


def ask(
    port: int,
    host: str | tuple[str, ...],
    path: str = "/",
    *,
    method: str = "GET",
    authorization: str | None = None,
) -> tuple[int, str]:
    """Send one request with exactly these Host headers."""
    hosts = (host,) if isinstance(host, str) else host
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name in hosts:
            connection.putheader("Host", name.format(port=port))
        connection.putheader("Content-Length", "0")
        if authorization is not None:
            connection.putheader("Authorization", authorization)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


PAGES = {"/metrics": lambda: PageResponse(body=b"figures"), "/livez": lambda: PageResponse(body=b"ok")}


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[PageServer]:
    server = PageServer.on_port("127.0.0.1", 20_000, PAGES, data_dir=tmp_path, tries=2000)
    yield server
    server.close()


@pytest.fixture
def key(tmp_path: Path) -> str:
    """The header with the key of the pages."""
    return f"Bearer {monitoring_key(tmp_path)[1]}"


@pytest.mark.parametrize("host", OUR_NAMES)
def test_pages_on_loopback_answer_to_names_of_loopback(pages: PageServer, key: str, host: str) -> None:
    assert ask(pages.port, host, "/metrics", authorization=key) == (HTTPStatus.OK, "figures")


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer x", "bearer {key}", "Basic {key}"])
def test_pages_on_loopback_need_the_key_and_probes_do_not(
    pages: PageServer, key: str, given: str | None
) -> None:
    sent = None if given is None else given.format(key=key.removeprefix("Bearer "))
    for path in ("/metrics", "/nothing"):
        status, text = ask(pages.port, "localhost", path, authorization=sent)
        assert status == HTTPStatus.UNAUTHORIZED and "figures" not in text
    assert ask(pages.port, "localhost", "/livez", authorization=sent) == (HTTPStatus.OK, "ok")


@pytest.mark.parametrize("host", [*OTHERS, ("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1")])
def test_pages_on_loopback_refuse_every_other_host(pages: PageServer, key: str, host: str) -> None:
    for path in ("/metrics", "/nothing"):
        status, text = ask(pages.port, host, path, authorization=key)
        assert status == HTTPStatus.MISDIRECTED_REQUEST
        assert "localhost" in text and "figures" not in text and "evil" not in text


def test_pages_for_a_network_answer_to_every_host(tmp_path: Path) -> None:
    server = PageServer.on_port("0.0.0.0", 20_000, PAGES, data_dir=tmp_path, tries=2000)
    try:
        assert ask(server.port, "metrics.internal:9463", "/metrics") == (HTTPStatus.OK, "figures")
    finally:
        server.close()
    assert [is_loopback(address) for address in ("127.0.0.1", "127.8.0.1", "::1", "localhost")] == [True] * 4
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "metrics.internal", "")))


def test_a_request_without_a_host_header_is_answered(pages: PageServer, key: str) -> None:
    assert ask(pages.port, (), "/metrics", authorization=key)[0] == HTTPStatus.OK
    assert AllowedHosts().admits([])


@pytest.mark.parametrize(
    "path", ["/metrics%0d%0aSet-Cookie:%20a=b", "/x\x85Set-Cookie:a=b", "/<script>alert(1)"]
)
def test_pages_reflect_nothing_of_a_request(pages: PageServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", pages.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode("latin-1"))
        received = b"".join(iter(lambda: connection.recv(4096), b""))
    first, *others = re.split(rb"[\r\n\x85]+", received)
    assert first.startswith(b"HTTP/1.0 4")
    assert not [line for line in others if line.lower().startswith(b"set-cookie")]
    assert b"<script" not in received


@pytest.fixture(scope="module")
def start_flower(
    redis_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[int, Path]]]:
    """Start a Flower; returns its port when it answers, and its data directory."""
    pytest.importorskip("flower", reason="pip install nekro-workers[flower]")
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str, **environment: str) -> tuple[int, Path]:
        port = free_port()
        settings = Settings.load(
            env_file=None,
            data_dir=tmp_path_factory.mktemp("flower"),
            broker={"url": redis_server.url, "key_prefix": f"flower{port}:"},
            plugins={"load_shipped": False},
            security={"signing_key": "test-signing-key"},
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "nekro.cli.main", "flower", "--port", str(port), *options],
            env=environment_of(settings) | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        processes.append(process)
        wait_until(lambda: answers(port))
        return port, settings.data_dir

    yield start
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(WAIT_SECONDS)


def answers(port: int) -> bool:
    try:
        return ask(port, "127.0.0.1", "/healthcheck")[0] in (HTTPStatus.OK, HTTPStatus.UNAUTHORIZED)
    except OSError:
        return False


@pytest.fixture(scope="module")
def plain_flower(start_flower: Callable[..., tuple[int, Path]]) -> tuple[int, Path]:
    """A Flower for which nobody stated a password."""
    return start_flower()


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


FLOWER_PATHS = ("/", "/workers", "/tasks/datatable", "/api/tasks", "/api/workers", "/metrics", "/nothing")


def test_flower_always_has_a_password(plain_flower: tuple[int, Path]) -> None:
    port, data_dir = plain_flower
    path, key = monitoring_key(data_dir)
    assert path.stat().st_mode & 0o077 == 0
    guesses = (
        None,
        basic("nekro:"),
        basic(":"),
        basic("nekro:guess"),
        f"Bearer {key}",
        "Basic",
        "Basic \xe9",
    )
    for guess in guesses:
        for asked in FLOWER_PATHS:
            status, text = ask(port, "127.0.0.1", asked, authorization=guess)
            assert status == HTTPStatus.UNAUTHORIZED, (asked, guess)
            assert "flower_" not in text
        revoked = ask(port, "127.0.0.1", "/api/task/revoke/x", method="POST", authorization=guess)
        assert revoked[0] == HTTPStatus.UNAUTHORIZED
    status, text = ask(port, "127.0.0.1", "/workers", authorization=basic(f"nekro:{key}"))
    assert status == HTTPStatus.OK and "Flower" in text
    assert "flower_" in ask(port, "127.0.0.1", "/metrics", authorization=basic(f"nekro:{key}"))[1]


def test_a_stated_password_is_the_only_one(start_flower: Callable[..., tuple[int, Path]]) -> None:
    port, data_dir = start_flower(FLOWER_BASIC_AUTH="ada:secret")
    assert not secret_path(data_dir, "monitoring.key").exists()
    assert ask(port, "flower.example", "/workers")[0] == HTTPStatus.UNAUTHORIZED
    assert ask(port, "flower.example", "/workers", authorization=basic("ada:secret"))[0] == HTTPStatus.OK


def test_the_health_check_of_the_command_passes(plain_flower: tuple[int, Path]) -> None:
    asked = [
        sys.executable,
        "-P",
        "-m",
        "nekro.cli.main",
        "flower",
        "--check",
        "--port",
        str(plain_flower[0]),
    ]
    assert subprocess.run(asked, capture_output=True, timeout=60).returncode == 0
