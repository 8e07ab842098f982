"""Servers without a password refuse web sites whose name was made to resolve to this machine."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest
from redis_process import free_port
from waiting import WAIT_SECONDS, wait_until

from broker_config.settings import Settings
from cli.environment import environment_of
from workers.ops.host_header import AllowedHosts, is_loopback
from workers.ops.http_server import Page, PageServer

pytestmark = pytest.mark.extended

OUR_NAMES = ("localhost", "LOCALHOST.", "127.0.0.1", "127.0.0.1:{port}", "[::1]:{port}", "[0:0:0:0:0:0:0:1]")
OTHERS = (
    "evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "",
    "127.0.0.1, evil.example", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "[::1]evil.example", "::1",
    "127.1", "127.0.0.2", "127.0.0.1:80:90", "[::ffff:7f00:1]", "[fe80::1%25lo]",
    " ", "localhost\t.evil.example",
)  # fmt: skip


def ask(port: int, host: str | tuple[str, ...], path: str = "/", *, method: str = "GET") -> tuple[int, str]:
    """Send one request with exactly these Host headers."""
    hosts = (host,) if isinstance(host, str) else host
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name in hosts:
            connection.putheader("Host", name.format(port=port))
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def pages() -> Iterator[PageServer]:
    server = PageServer.on_port("127.0.0.1", 20_000, {"/metrics": lambda: Page(body=b"figures")}, tries=2000)
    yield server
    server.close()


@pytest.mark.parametrize("host", OUR_NAMES)
def test_pages_on_loopback_answer_to_names_of_loopback(pages: PageServer, host: str) -> None:
    assert ask(pages.port, host, "/metrics") == (HTTPStatus.OK, "figures")


@pytest.mark.parametrize("host", [*OTHERS, ("127.0.0.1", "evil.example"), ("evil.example", "127.0.0.1")])
def test_pages_on_loopback_refuse_every_other_host(pages: PageServer, host: str) -> None:
    for path in ("/metrics", "/nothing"):
        status, text = ask(pages.port, host, path)
        assert status == HTTPStatus.MISDIRECTED_REQUEST
        assert "localhost" in text and "figures" not in text and "evil" not in text


def test_pages_for_a_network_answer_to_every_host() -> None:
    server = PageServer.on_port("0.0.0.0", 20_000, {"/metrics": lambda: Page(body=b"figures")}, tries=2000)
    try:
        assert ask(server.port, "metrics.internal:9463", "/metrics") == (HTTPStatus.OK, "figures")
    finally:
        server.close()
    assert [is_loopback(address) for address in ("127.0.0.1", "127.8.0.1", "::1", "localhost")] == [True] * 4
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "metrics.internal", "")))


def test_a_request_without_a_host_header_is_answered(pages: PageServer) -> None:
    assert ask(pages.port, (), "/metrics")[0] == HTTPStatus.OK
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
def start_flower(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., int]]:
    """Start a Flower; returns its port when it answers."""
    pytest.importorskip("flower", reason="pip install nekro-workers[flower]")
    processes: list[subprocess.Popen[bytes]] = []

    def start(*options: str, **environment: str) -> int:
        port = free_port()
        settings = Settings.load(
            env_file=None,
            data_dir=tmp_path_factory.mktemp("flower"),
            broker={"url": redis_server.url, "key_prefix": f"flower{port}:"},
            plugins={"load_shipped": False},
            security={"signing_key": "test-signing-key"},
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli.main", "flower", "--port", str(port), *options],
            env=environment_of(settings) | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        processes.append(process)
        wait_until(lambda: answers(port))
        return port

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
def open_flower(start_flower: Callable[..., int]) -> int:
    return start_flower("--allow-host", "Flower.Internal")


@pytest.mark.parametrize("host", [*OUR_NAMES, "flower.internal", "flower.internal:443"])
def test_flower_without_a_password_answers_to_its_own_names(open_flower: int, host: str) -> None:
    status, text = ask(open_flower, host, "/workers")
    assert status == HTTPStatus.OK and "Flower" in text


@pytest.mark.parametrize("host", [host for host in OTHERS if host.strip()])
def test_flower_without_a_password_refuses_every_other_host(open_flower: int, host: str) -> None:
    for path in (
        "/workers",
        "/tasks/datatable",
        "/static/js/flower.js",
        "/api/tasks",
        "/metrics",
        "/nothing",
    ):
        status, text = ask(open_flower, host, path)
        assert 400 <= status < 500
        assert "<html" not in text and "evil" not in text
    assert ask(open_flower, host, "/api/task/revoke/x", method="POST")[0] >= 400


def test_the_refusal_names_the_fix(open_flower: int) -> None:
    status, text = ask(open_flower, "evil.example", "/")
    assert status == HTTPStatus.MISDIRECTED_REQUEST
    assert "FLOWER_BASIC_AUTH" in text and "--allow-host" in text


def test_flower_with_a_password_answers_to_every_name(start_flower: Callable[..., int]) -> None:
    port = start_flower(FLOWER_BASIC_AUTH="ada:secret")
    assert ask(port, "flower.example", "/workers")[0] == HTTPStatus.UNAUTHORIZED


def test_the_health_check_of_the_command_passes(open_flower: int) -> None:
    asked = [sys.executable, "-P", "-m", "cli.main", "flower", "--check", "--port", str(open_flower)]
    assert subprocess.run(asked, capture_output=True, timeout=60).returncode == 0
