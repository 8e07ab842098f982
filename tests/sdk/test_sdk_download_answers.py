"""Answers of HTTP servers: odd redirects, log-ins, cookies, unasked encodings, pauses, names."""

from __future__ import annotations

import gzip
import hashlib
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from file_server import FileServer
from loguru import logger

from nekro_agent.downloads.download import fetch
from nekro_agent.durations import stated_pause
from nekro_agent.errors import DownloadError, DownloadRefusedError
from nekro_agent.files.file_system import FileSystem
from nekro_agent.plugin import NekroPlugin
from nekro_agent.testing import InMemoryRuntime

pytestmark = pytest.mark.usefixtures("world")
Respond = Callable[[BaseHTTPRequestHandler], None]
#: The user name and password of the tests' URLs, and the header of both.
LOGIN, BASIC = "ada:s3%2Fcret", "Basic YWRhOnMzL2NyZXQ="


def respond(status: int = 200, body: bytes = b"", **headers: str) -> Respond:
    """Answer with headers, whose names have ``_`` for ``-``; their text is sent as UTF-8."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value.encode().decode("latin-1"))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def in_turn(*answers: Respond) -> Respond:
    """Give one answer after the other, and the last one again."""
    left = list(answers)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


@pytest.fixture
def other_server() -> Any:
    server = FileServer()
    yield server
    server.stop()


@pytest.fixture
async def world(plugin: NekroPlugin, tmp_path: Path) -> AsyncIterator[InMemoryRuntime]:
    """A bound runtime with few attempts, and several connections for a file of some megabytes."""
    policy = replace(FileServer.policy, timeout_seconds=10, connections=4, parallel_min_bytes=1 << 20)
    async with InMemoryRuntime(plugin, data_dir=tmp_path / "data", downloads=policy) as bound:
        yield bound


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A file in an empty directory."""
    (tmp_path / "target").mkdir()
    return tmp_path / "target" / "f"


# Redirects


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/文件/報告.pdf?名=値", "/%E6%96%87%E4%BB%B6/%E5%A0%B1%E5%91%8A.pdf?%E5%90%8D=%E5%80%A4"),
        ("next", "/deep/next"),
        ("../up", "/up"),
        ("?q=1", "/deep/start?q=1"),
        ("  /spaced out ", "/spaced%20out"),
        ("/fragment#part", "/fragment"),
    ],
)
async def test_a_location_is_read_as_servers_write_it(
    file_server: FileServer, target: Path, location: str, path: str
) -> None:
    url = file_server.answer_with("/deep/start", respond(302, Location=location))
    file_server.add(path, b"found")
    result = await fetch(url, target)
    assert (result.path.read_bytes(), result.url) == (b"found", file_server.base + path)


async def test_a_location_in_another_encoding_is_requested_byte_by_byte(
    file_server: FileServer, target: Path
) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/caf\xe9")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    file_server.add("/caf%E9", b"found")
    assert (await fetch(file_server.answer_with("/x", answer), target)).size_bytes == 5


async def test_a_log_in_of_the_url_is_used_for_its_server_and_shown_nowhere(
    file_server: FileServer, other_server: FileServer, target: Path
) -> None:
    lines: list[str] = []
    sink = logger.add(lambda line: lines.append(str(line)), level=0)
    try:
        file_server.redirect("/same", "/moved")
        file_server.redirect("/moved", other_server.add("/elsewhere", b"x"))
        result = await fetch(f"http://{LOGIN}@127.0.0.1:{file_server.port}/same", target)
        with pytest.raises(DownloadError) as caught:
            await fetch(f"http://{LOGIN}@127.0.0.1:{file_server.port}/missing", target.with_name("g"))
    finally:
        logger.remove(sink)
    assert [headers.get("authorization") for headers in file_server.headers] == [BASIC] * 3
    assert "authorization" not in other_server.headers[0]
    assert "s3" not in f"{result} {caught.value} {lines}"


async def test_a_log_in_of_a_redirect_is_used_for_the_same_server_only(
    file_server: FileServer, other_server: FileServer, target: Path
) -> None:
    file_server.redirect("/a", f"http://{LOGIN}@127.0.0.1:{file_server.port}/b")
    file_server.redirect("/b", f"http://{LOGIN}@127.0.0.1:{other_server.port}/c")
    other_server.add("/c", b"x")
    result = await fetch(file_server.base + "/a", target)
    assert [headers.get("authorization") for headers in file_server.headers] == [None, BASIC]
    assert "authorization" not in other_server.headers[0]
    assert result.url == other_server.base + "/c"


@pytest.mark.parametrize(
    "location", ["ftp://ada:s3cret@h/x", "http://ada:s3cret@h:99999/", "//ada:s3cret@[x/"]
)
async def test_a_refused_redirect_does_not_show_its_log_in(
    file_server: FileServer, target: Path, location: str
) -> None:
    with pytest.raises(DownloadRefusedError) as caught:
        await fetch(file_server.redirect("/a", location), target)
    assert "s3cret" not in str(caught.value)


async def test_cookies_are_kept_for_a_chain_and_go_to_their_own_server(
    file_server: FileServer, other_server: FileServer, target: Path
) -> None:
    def gate(handler: BaseHTTPRequestHandler) -> None:
        if "pass=1; odd=a=b" in (handler.headers.get("Cookie") or ""):
            respond(302, Location=other_server.base + "/c")(handler)
            return
        handler.send_response(302)
        for cookie in ("pass=1; Path=/; HttpOnly", "odd=a=b", "gone=1; Max-Age=0", "no cookie", "bad=\x01"):
            handler.send_header("Set-Cookie", cookie)
        handler.send_header("Location", "/gate")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    file_server.answer_with("/gate", gate)
    other_server.redirect("/c", file_server.add("/end", b"x"))
    await fetch(file_server.base + "/gate", target, headers={"Cookie": "mine=2"})
    sent = [headers.get("cookie") for headers in file_server.headers]
    assert sent == ["mine=2", "mine=2; pass=1; odd=a=b; bad=", "pass=1; odd=a=b; bad="]
    assert "cookie" not in other_server.headers[0]
    await fetch(file_server.base + "/end", target.with_name("g"))
    assert "cookie" not in file_server.headers[-1]


# Encodings


TEXT = b"".join(b"line %d\n" % number for number in range(50_000))


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("X-GZip", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)),
        ("gzip", gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])),
        ("identity", TEXT),
    ],
)
async def test_an_encoding_that_was_not_asked_for_is_decoded(
    file_server: FileServer, target: Path, encoding: str, body: bytes
) -> None:
    url = file_server.answer_with("/f", respond(200, body, Content_Encoding=encoding, ETag='"1"'))
    result = await fetch(url, target, sha256=hashlib.sha256(TEXT).hexdigest())
    assert file_server.headers[0]["accept-encoding"] == "identity"
    assert result.path.read_bytes() == TEXT and result.size_bytes == len(TEXT)


@pytest.mark.parametrize(
    ("encoding", "body", "error"),
    [
        ("br", b"x", DownloadRefusedError),
        ("gzip, gzip", b"x", DownloadRefusedError),
        ("gzip", b"this is no gzip", DownloadError),
        ("gzip", gzip.compress(TEXT)[:-5], DownloadError),
    ],
)
async def test_a_body_that_cannot_be_decoded_is_an_error_and_leaves_nothing(
    file_server: FileServer, target: Path, encoding: str, body: bytes, error: type[Exception]
) -> None:
    url = file_server.answer_with("/f", respond(200, body, Content_Encoding=encoding))
    with pytest.raises(error, match=r"encoded|broke off"):
        await fetch(url, target)
    assert list(target.parent.iterdir()) == []


async def test_the_decoded_size_is_limited(file_server: FileServer, target: Path) -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    url = file_server.answer_with("/f", respond(200, bomb, Content_Encoding="gzip"))
    with pytest.raises(DownloadRefusedError, match="more than the limit"):
        await fetch(url, target, max_bytes=4 << 20)
    assert list(target.parent.iterdir()) == []


async def test_an_encoded_range_is_not_joined_to_what_is_there(file_server: FileServer, target: Path) -> None:
    content, encoded = TEXT, gzip.compress(TEXT)

    def cut_off(handler: BaseHTTPRequestHandler) -> None:
        head = respond(200, b"", Content_Length=str(len(content)), ETag='"1"', Accept_Ranges="bytes")
        head(handler)
        handler.wfile.write(content[: 200 << 10])

    def rest(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        stated = f"bytes {start}-{len(content) - 1}/{len(content)}"
        respond(206, encoded, Content_Range=stated, Content_Encoding="gzip", ETag='"1"')(handler)

    whole = respond(200, encoded, Content_Encoding="gzip", ETag='"1"')
    url = file_server.answer_with("/f", in_turn(cut_off, rest, whole))
    assert (await fetch(url, target)).path.read_bytes() == content
    assert "range" in file_server.headers[1] and "range" not in file_server.headers[2]


# Pauses


def later(seconds: int) -> str:
    return formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {"Retry_After": "1"}), (503, {"Retry_After": "1"}), (429, {"Retry_After": later(-5)}), (429, {})],
    ids=["429", "503", "date", "no pause"],
)
async def test_a_busy_server_is_asked_again_also_at_the_first_request(
    file_server: FileServer, target: Path, status: int, headers: Mapping[str, str]
) -> None:
    url = file_server.answer_with("/f", in_turn(respond(status, **headers), respond(200, b"x")))
    assert (await fetch(url, target)).size_bytes == 1
    assert len(file_server.requests) == 2


async def test_stated_pauses_are_no_failures(file_server: FileServer, target: Path) -> None:
    busy = respond(429, Retry_After="1")
    url = file_server.answer_with("/f", in_turn(busy, busy, busy, respond(200, b"x")))
    assert (await fetch(url, target)).size_bytes == 1


async def test_a_pause_longer_than_the_limit_is_an_error_that_names_both(
    file_server: FileServer, target: Path
) -> None:
    url = file_server.answer_with("/f", respond(429, Retry_After="3600"))
    with pytest.raises(DownloadError, match=r"429 and asks for a pause of 3600 s; downloads wait 10 s"):
        await fetch(url, target)
    assert len(file_server.requests) == 1


async def test_each_segment_waits_for_a_busy_server(file_server: FileServer, target: Path) -> None:
    content = bytes(range(256)) * (64 << 10)
    busy_for: set[str] = set()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        if wanted is None:
            respond(200, content, ETag='"1"', Accept_Ranges="bytes")(handler)
        elif wanted not in busy_for:
            busy_for.add(wanted)
            respond(429, Retry_After="1")(handler)
        else:
            start, end = map(int, wanted.removeprefix("bytes=").split("-"))
            stated = f"bytes {start}-{end}/{len(content)}"
            respond(206, content[start : end + 1], Content_Range=stated, ETag='"1"')(handler)

    result = await fetch(file_server.answer_with("/f", answer), target)
    assert result.path.read_bytes() == content and len(busy_for) >= 2


@pytest.mark.parametrize(
    ("header", "now", "seconds"),
    [
        ("120", None, 120), (" 7 ", None, 7), ("0", None, 0), ("-1", None, None), ("soon", None, None),
        ("", None, None), (None, None, None), ("9" * 400, None, 999_999_999),
        ("Fri, 31 Dec 1999 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:00 GMT", 59),
        ("Fri, 31 Dec 1999 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:59 GMT", 0),
        ("Fri, 31 Dec 1999 23:59:59 GMT", None, 0),
        ("inf", None, None), ("nan", None, None), ("1.5", None, 1.5),
        ("Friday, 31-Dec-99 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:00 GMT", 59),
    ],
)  # fmt: skip
def test_a_pause_is_a_number_or_a_date(header: str | None, now: str | None, seconds: float | None) -> None:
    assert stated_pause(header, now=now) == seconds


# Names


async def test_a_file_of_a_url_has_the_name_that_its_server_states(
    file_server: FileServer, fs: FileSystem
) -> None:
    def url(path: str, body: bytes) -> str:
        header = "attachment; filename=\"old.pdf\"; filename*=UTF-8''%E5%A0%B1%E5%91%8A.pdf"
        return file_server.answer_with(path, respond(200, body, Content_Disposition=header))

    assert await fs.mixed_forward_file(url("/d?id=1", b"one")) == "/app/uploads/報告.pdf"
    assert await fs.mixed_forward_file(url("/d?id=1", b"one")) == "/app/uploads/報告.pdf"
    assert await fs.mixed_forward_file(url("/d?id=2", b"two")) == "/app/uploads/報告-2.pdf"
    assert await fs.mixed_forward_file(url("/d?id=3", b"3"), file_name="mine.pdf") == "/app/uploads/mine.pdf"
    assert {path.name for path in fs.upload_path.iterdir()} == {"報告.pdf", "報告-2.pdf", "mine.pdf"}


@pytest.mark.parametrize(
    "header", ["attachment", "attachment; filename=", 'attachment; filename=".."', "inline; filename*=x''y"]
)
async def test_a_file_without_a_usable_name_gets_one(
    file_server: FileServer, fs: FileSystem, header: str
) -> None:
    url = file_server.answer_with("/d.csv?id=1", respond(200, b"x", Content_Disposition=header))
    path = await fs.mixed_forward_file(url)
    assert path == f"/app/uploads/{hashlib.md5(url.encode()).hexdigest()}.csv"
