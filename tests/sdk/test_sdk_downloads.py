"""``fetch``: complete files or none, within limits, from permitted addresses."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import socket
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer
from waiting import WAIT_SECONDS

from nekro_agent.downloads.addresses import AddressPolicy, is_same_server
from nekro_agent.downloads.download import fetch
from nekro_agent.errors import DownloadError, DownloadRefusedError, InvalidValueError, SettingsError
from nekro_agent.testing import InMemoryRuntime

LOCAL = ("127.0.0.0/8",)
BIG = bytes(range(256)) * 12_000  # three pieces of a mebibyte


def only(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file())


async def test_a_file_arrives_whole_with_its_digest(file_server: FileServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    url = file_server.add("/big", BIG, content_type="application/x-model")
    result = await fetch(
        url,
        tmp_path / "a" / "b.bin",
        sha256=hashlib.sha256(BIG).hexdigest().upper(),
        allow_private=LOCAL,
        progress=lambda done, whole: seen.append((done, whole)),
    )
    assert result.path.read_bytes() == BIG
    assert (result.size_bytes, result.content_type, result.url) == (len(BIG), "application/x-model", url)
    assert [whole for _, whole in seen] == [len(BIG)] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == len(BIG)
    assert only(tmp_path) == ["b.bin"]


async def test_a_file_is_replaced_atomically_and_only_by_a_valid_one(
    file_server: FileServer, tmp_path: Path
) -> None:
    target = tmp_path / "f"
    target.write_text("old")
    url = file_server.add("/f", b"new")
    with pytest.raises(DownloadRefusedError, match=r"content has SHA-256 11507a0e.*expected 0{64}"):
        await fetch(url, target, sha256="0" * 64, allow_private=LOCAL)
    assert target.read_text() == "old"
    await fetch(url, target, allow_private=LOCAL)
    assert target.read_text() == "new"
    assert only(tmp_path) == ["f"]


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 65536)
    except OSError:
        pass


def cut_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)


async def test_sizes_are_limited_whether_announced_or_not(file_server: FileServer, tmp_path: Path) -> None:
    announced = file_server.add("/announced", b"x" * 1001)
    with pytest.raises(DownloadRefusedError, match="has 1001 bytes, the limit is 1000"):
        await fetch(announced, tmp_path / "f", max_bytes=1000, allow_private=LOCAL)
    with pytest.raises(DownloadRefusedError, match="sends more than the limit of 100000 bytes"):
        await fetch(
            file_server.answer_with("/endless", endless),
            tmp_path / "f",
            max_bytes=100_000,
            allow_private=LOCAL,
        )
    assert only(tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (cut_off, "broke off after 10 bytes"),
        (lambda handler: handler.send_error(500), "answered 500"),
        (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "cannot be fetched"),
    ],
)
async def test_a_failing_server_leaves_no_file(
    file_server: FileServer, world: InMemoryRuntime, tmp_path: Path, answer: Any, reason: str
) -> None:
    with pytest.raises(DownloadError, match=reason) as caught:
        await fetch(file_server.answer_with("/bad", answer), tmp_path / "f", allow_private=LOCAL)
    assert caught.value.retryable
    assert not (tmp_path / "f").exists() and list(tmp_path.glob(".f*")) == []


async def test_a_silent_server_times_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(DownloadError, match="cannot be fetched"):
            await fetch(url, tmp_path / "f", timeout_seconds=0.05, allow_private=LOCAL)


async def test_a_cancelled_download_leaves_no_file(file_server: FileServer, tmp_path: Path) -> None:
    started = asyncio.Event()
    url = file_server.answer_with("/endless", endless)
    task = asyncio.create_task(
        fetch(url, tmp_path / "f", allow_private=LOCAL, progress=lambda done, whole: started.set())
    )
    await asyncio.wait_for(started.wait(), WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert only(tmp_path) == []


async def test_redirects_are_followed_and_each_is_checked(file_server: FileServer, tmp_path: Path) -> None:
    file_server.add("/end", b"content")
    start = file_server.redirect("/start", "/end")
    result = await fetch(start, tmp_path / "f", allow_private=LOCAL)
    assert (result.url, result.path.read_bytes()) == (file_server.base + "/end", b"content")
    for target, reason in [
        ("file:///etc/passwd", "is not an http"),
        ("http://[", r"redirects to 'http://\[', which is not a URL"),
        ("http://169.254.169.254/latest/meta-data", r"is at 169\.254\.169\.254"),
        (f"http://[::1]:{file_server.port}/end", "is at ::1: private"),
    ]:
        with pytest.raises(DownloadRefusedError, match=reason):
            await fetch(file_server.redirect("/away", target), tmp_path / "g", allow_private=LOCAL)
    loop = file_server.redirect("/loop", "/loop")
    with pytest.raises(DownloadError, match="more than 10 redirects"):
        await fetch(loop, tmp_path / "g", allow_private=LOCAL)


async def test_credentials_do_not_follow_a_redirect_to_another_port(
    file_server: FileServer, tmp_path: Path
) -> None:
    other = FileServer()
    try:
        url = file_server.redirect("/other", other.add("/end", b"x"))
        headers = {"Authorization": "Bearer secret"}
        await fetch(url, tmp_path / "f", headers=headers, allow_private=LOCAL)
        assert [seen.get("authorization") for seen in other.headers] == [None]
    finally:
        other.stop()


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("https://a.example/x", "https://a.example/y", True),
        ("http://a.example/x", "https://a.example/x", True),
        ("https://a.example/x", "http://a.example/x", False),
        ("http://a.example/x", "https://a.example:8443/x", False),
        ("https://a.example/x", "https://b.example/x", False),
    ],
)
def test_credentials_follow_no_redirect_from_https_to_plain_http(
    source: str, target: str, expected: bool
) -> None:
    assert is_same_server(source, target) is expected


async def test_credentials_do_not_follow_a_redirect_to_another_host(
    file_server: FileServer, tmp_path: Path
) -> None:
    file_server.add("/end", b"x")
    file_server.redirect("/same", "/end")
    file_server.redirect("/other", f"http://localhost:{file_server.port}/end")
    headers = {"Authorization": "Bearer secret", "X-Kind": "model"}
    for path in ("/same", "/other"):
        await fetch(
            file_server.base + path, tmp_path / "f", headers=headers, allow_private=("localhost", *LOCAL)
        )
    seen = [(h.get("authorization"), h.get("x-kind")) for h in file_server.headers]
    assert seen == [("Bearer secret", "model")] * 3 + [(None, "model")]


@pytest.mark.parametrize(
    "url", ["ftp://x/y", "file:///etc/passwd", "http://", "//x/y", "http://[::1", "x", "", "http://a:b/c"]
)
async def test_invalid_web_addresses_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(DownloadRefusedError):
        await fetch(url, tmp_path / "f")


async def test_unicode_urls_and_user_names_reach_the_server_in_ascii(
    file_server: FileServer, tmp_path: Path
) -> None:
    file_server.add("/%E7%8C%AB?q=%E7%8A%AC&a=%20", b"x")
    url = f"http://user:pw@127.0.0.1:{file_server.port}/猫?q=犬&a=%20"
    await fetch(url, tmp_path / "f", allow_private=LOCAL)
    assert file_server.headers[0]["host"] == f"127.0.0.1:{file_server.port}"


async def test_invalid_targets_are_named(file_server: FileServer, tmp_path: Path) -> None:
    url = file_server.add("/x", b"x")
    with pytest.raises(InvalidValueError, match="is a directory"):
        await fetch(url, tmp_path, allow_private=LOCAL)
    with pytest.raises(InvalidValueError, match="is not a digest"):
        await fetch(url, tmp_path / "f", sha256="abc", allow_private=LOCAL)
    (tmp_path / "file").touch()
    with pytest.raises(DownloadError, match="cannot write"):
        await fetch(url, tmp_path / "file" / "below", allow_private=LOCAL)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "172.31.255.255", "169.254.169.254", "0.0.0.0",
        "0.1.2.3", "100.64.0.1", "100.127.255.255", "192.0.0.8", "192.0.0.9", "192.0.2.1", "192.88.99.1",
        "192.88.99.255", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1",
        "239.255.255.255", "240.0.0.1", "255.255.255.255",
        "::1", "::", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:192.88.99.1",
        "::ffff:0:7f00:1",
        "64:ff9b::7f00:1", "64:ff9b::c058:6301", "64:ff9b:1::5db8:d822", "100::1", "100:0:0:1::1", "1fff::1",
        "2001::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:0:5db8:d822::a247:27dd", "2001:2::1",
        "2001:10::1", "2001:20::1", "2001:1ff::1", "2001:db8::1", "2002:7f00:1::", "2002:c0a8:1::1",
        "2002:c058:6301::", "3fff::1", "3fff:fff:ffff::1", "4000::1", "5f00::1", "fc00::1", "fd00::1",
        "fe80::1%eth0", "fe80::1", "fec0::1", "feff::1", "ff02::1", "ff0e::1",
    ],
)  # fmt: skip
def test_non_public_addresses_are_refused(address: str) -> None:
    assert not AddressPolicy().admits("host.example", address)


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1", "93.184.216.34", "100.63.255.255", "100.128.0.1", "172.32.0.1", "192.0.1.1",
        "192.88.98.255",
        "192.88.100.1", "198.17.255.255", "198.20.0.1", "223.255.255.255", "2606:4700::1111", "2001:200::1",
        "2001:4860::8888", "2003::1", "2a00::1", "3ffe::1", "3fff:1000::1", "64:ff9b::5db8:d822",
        "::ffff:93.184.216.34", "2002:5db8:d822::1",
    ],
)  # fmt: skip
def test_public_addresses_are_admitted(address: str) -> None:
    assert AddressPolicy().admits("host.example", address)


@pytest.mark.parametrize("attribute", ["is_global", "is_private", "is_reserved", "ipv4_mapped"])
def test_public_address_ranges_do_not_depend_on_the_python_version(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        monkeypatch.setattr(kind, attribute, property(lambda _: pytest.fail("asked")), raising=False)
    for address in ("10.0.0.1", "93.184.216.34", "fec0::1", "2606:4700::1111", "::ffff:10.0.0.1"):
        AddressPolicy().admits("host.example", address)


def test_hosts_and_networks_can_be_allowed() -> None:
    policy = AddressPolicy(["models.internal", "10.0.0.0/8", "192.168.1.7"])
    assert policy.admits("Models.Internal.", "172.16.0.1")
    assert policy.admits("x", "10.9.9.9") and policy.admits("x", "192.168.1.7")
    assert not policy.admits("x", "192.168.1.8")
    with pytest.raises(SettingsError, match=r"'10\.0\.0\.0/99' is not a network"):
        AddressPolicy(["10.0.0.0/99"])


async def test_a_name_that_changes_its_address_is_connected_at_the_checked_one(
    file_server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to the checked address, even if the name resolves differently later."""
    file_server.add("/x", b"x")
    answers = iter([["93.184.216.34"], ["127.0.0.1"], ["127.0.0.1"]])
    loop = asyncio.get_running_loop()
    asked: list[str] = []

    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        asked.append(host)
        family = socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (address, port)) for address in next(answers)]

    connected: list[str] = []
    really_connect = loop.sock_connect

    async def connect(connection: socket.socket, address: tuple[str, int]) -> None:
        connected.append(address[0])
        if address[0] == "93.184.216.34":
            raise ConnectionRefusedError("no network in this test")
        await really_connect(connection, address)

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    monkeypatch.setattr(loop, "sock_connect", connect)
    url = f"http://rebind.example:{file_server.port}/x"
    with pytest.raises(DownloadError, match="does not accept connections"):
        await fetch(url, tmp_path / "f", allow_private=())
    assert (asked[0], set(connected)) == ("rebind.example", {"93.184.216.34"})
    assert file_server.requests == []
