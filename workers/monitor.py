"""What a worker tells probes and Prometheus: ``/livez``, ``/readyz`` and ``/metrics`` over HTTP.

Always on a Unix socket, for `nekro worker --check` on the same host or in the same container;
on a TCP port too where ``metrics.port`` asks for it. The answers come from a thread of their
own, so that a worker that hangs is told from one that is gone.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Self

from loguru import logger

from broker_config.settings import MetricsSettings
from nekro_agent.errors import ServiceError
from workers.health import Report

__all__ = ["Monitor", "socket_dir"]

#: Ports tried when several workers of one host share a setting.
_PORTS: Final = 64
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"

Check = Callable[[], Report]


def socket_dir() -> Path:
    """Directory of this user's monitor sockets; made if it is missing, nobody else's to enter.

    Raises:
        ServiceError: somebody else made it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - a private directory below it
    directory = Path(base) / f"nekro-workers-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid() or not directory.is_dir():
        raise ServiceError(f"{directory} belongs to somebody else; remove it or set XDG_RUNTIME_DIR")
    return directory


class Monitor:
    """The servers of one worker process."""

    def __init__(self, settings: MetricsSettings, *, lane: str, live: Check, ready: Check) -> None:
        """Take what to answer; listen for the length of a ``with`` block.

        Args:
            live, ready: called on a server's thread; may block for a few seconds.
        """
        self._settings = settings
        self._checks = {"/livez": live, "/readyz": ready}
        self._lane = lane
        self._path: Path | None = None
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> Self:
        """Listen.

        Raises:
            ServiceError: no port of the range asked for is free.
        """
        self._path = socket_dir() / f"{self._lane}.{os.getpid()}.sock"
        self._path.unlink(missing_ok=True)
        self._serve(_UnixServer(self._path, self._handler()))
        if self._settings.port:
            server = self._on_free_port()
            self._serve(server)
            logger.bind(address=self._settings.address, port=server.server_address[1]).info("metrics_served")
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _serve(self, server: ThreadingHTTPServer) -> None:
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, name="nekro-monitor", daemon=True).start()

    def _on_free_port(self) -> ThreadingHTTPServer:
        first, address = self._settings.port, self._settings.address
        for port in range(first, min(first + _PORTS, 65536)):
            try:
                return ThreadingHTTPServer((address, port), self._handler())
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise ServiceError(f"cannot listen on {address}:{port}: {exc.strerror}") from exc
        raise ServiceError(f"ports {first} and the {_PORTS} after it are taken; set NEKRO_METRICS__PORT")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        checks, counts = self._checks, self._settings.port > 0

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics" and counts:
                    self._answer(HTTPStatus.OK, _TEXT, _figures())
                elif path in checks:
                    report = checks[path]()
                    status = HTTPStatus.OK if report.ok else HTTPStatus.SERVICE_UNAVAILABLE
                    self._answer(status, "application/json", json.dumps(report.as_json()).encode())
                else:
                    self._answer(HTTPStatus.NOT_FOUND, _TEXT, b"/livez, /readyz or /metrics\n")

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing: probes come every few seconds."""

            def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler


class _UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    daemon_threads = True

    def __init__(self, path: Path, handler: type[BaseHTTPRequestHandler]) -> None:
        self._path = str(path)
        super().__init__(("", 0), handler)

    def server_bind(self) -> None:
        """Bind; the parent's looks for a host name, and a path has none."""
        self.socket.bind(self._path)
        self.server_name, self.server_port = "worker", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept; handlers expect a host and a port."""
        connection, _ = self.socket.accept()
        return connection, ("local", 0)


def _figures() -> bytes:
    from prometheus_client import generate_latest

    from broker_config.metrics import start_metrics

    return generate_latest(start_metrics().registry)
