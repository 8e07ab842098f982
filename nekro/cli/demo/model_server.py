"""A small HTTP server on loopback with one file to download, in place of a model repository."""

from __future__ import annotations

import hashlib
import http.server
import re
import threading
from types import TracebackType
from typing import Final

__all__ = ["ModelServer"]

_CHUNK_BYTES: Final = 256 << 10
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class ModelServer:
    """Serves ``/tiny-model.bin`` on a free port of 127.0.0.1, with ranges and a validator."""

    file_name = "tiny-model.bin"

    def __init__(self, *, size_bytes: int) -> None:
        """Create the file: incompressible bytes, the same in every run."""
        self.content = hashlib.shake_256(b"nekro-workers demo model").digest(size_bytes)
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.requests = 0
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, name="model-server", daemon=True)

    @property
    def url(self) -> str:
        """Address of the file."""
        return f"http://127.0.0.1:{self._server.server_port}/{self.file_name}"

    def __enter__(self) -> ModelServer:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._head(200, 0, len(server.content))

            def do_GET(self) -> None:
                server.requests += 1
                if self.path != f"/{server.file_name}":
                    self.send_error(404)
                    return
                start, end = self._wanted()
                if start >= end:
                    self.send_error(416)
                    return
                self._head(206 if "Range" in self.headers else 200, start, end)
                for offset in range(start, end, _CHUNK_BYTES):
                    self.wfile.write(server.content[offset : min(end, offset + _CHUNK_BYTES)])

            def _wanted(self) -> tuple[int, int]:
                size = len(server.content)
                match = _RANGE.fullmatch(self.headers.get("Range", ""))
                if match is None:
                    return 0, size
                return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size

            def _head(self, status: int, start: int, end: int) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(end - start))
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("ETag", f'"{server.sha256[:16]}"')
                if status == 206:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(server.content)}")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Log nothing: the timeline shows the download."""

        return Handler
