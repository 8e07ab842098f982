"""A local HTTP server for downloads; a test directory imports the fixture in its conftest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nekro_agent.runtime import DownloadPolicy

Answer = Callable[[BaseHTTPRequestHandler], None]


class FileServer:
    """Serves files that a test adds, on a loopback port, and records the requests."""

    policy = DownloadPolicy(allow_private=("127.0.0.0/8",), timeout_seconds=5, tries=2, retry_seconds=0.01)

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self._answers: dict[str, Answer] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.do_GET()

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                outer.headers.append({key.lower(): value for key, value in self.headers.items()})
                answer = outer._answers.get(self.path)
                if answer is None:
                    self.send_error(404)
                else:
                    answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.base = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, path: str, content: bytes, *, content_type: str = "application/octet-stream") -> str:
        """Serve ``content``; returns the URL."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", content_type)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)

        return self.answer_with(path, answer)

    def redirect(self, path: str, target: str) -> str:
        """Redirect to ``target``; returns the URL."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", target)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        return self.answer_with(path, answer)

    def answer_with(self, path: str, answer: Answer) -> str:
        """Answer with a function; returns the URL."""
        self._answers[path] = answer
        return self.base + path

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def file_server() -> Iterator[FileServer]:
    """A fresh server."""
    server = FileServer()
    yield server
    server.stop()
