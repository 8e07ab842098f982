"""A server that fails in the ways in which gateways, proxies and networks do: each answer is a function."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from nekro_client.models import Problem

__all__ = ["Request", "Script", "cut", "json_answer", "problem", "scripted", "stream"]


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Script:
    """Answers of the server in order; the last one is repeated."""

    def __init__(self, answers: list[Answer]) -> None:
        self.url = ""
        self.requests: list[Request] = []
        self._answers = answers
        self._lock = threading.Lock()

    def next(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.script.next(Request(self.command, self.path, headers, body))(self)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def log_message(self, *args: object) -> None:
        pass


Answer = Callable[[_Handler], None]


@contextmanager
def scripted(*answers: Answer) -> Iterator[Script]:
    """A server on a free loopback port."""
    script = Script(list(answers))
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(status: int, content: bytes, kind: str, **headers: str) -> Answer:
    """A whole answer."""

    def send(handler: _Handler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return send


def json_answer(text: str, status: int = 200) -> Answer:
    """A JSON document."""
    return answer(status, text.encode(), "application/json")


def problem(status: int, code: str, **headers: str) -> Answer:
    """A problem document of the gateway."""
    document = Problem(title="t", status=status, detail="d", code=code, request_id="r1")
    return answer(status, document.model_dump_json().encode(), "application/problem+json", **headers)


def cut(handler: _Handler) -> None:
    """Close the connection without an answer."""
    handler.close_connection = True
    handler.connection.shutdown(2)


def stream(*pieces: str, ends_well: bool = True) -> Answer:
    """An event stream that ends after its pieces; one that does not end well lacks its last chunk."""

    def send(handler: _Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for piece in pieces:
            data = piece.encode()
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        if ends_well:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return send


def partial(content: bytes, *, sends: int, etag: str) -> Answer:
    """The rest of a file from the asked range on; the connection is cut after ``sends`` bytes."""

    def send(handler: Any) -> None:
        first = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = content[first:]
        handler.send_response(206 if "Range" in handler.headers else 200)
        handler.send_header("Content-Type", "application/octet-stream")
        handler.send_header("Content-Length", str(len(rest)))
        handler.send_header("ETag", etag)
        handler.end_headers()
        handler.wfile.write(rest[:sends])
        handler.close_connection = True

    return send
