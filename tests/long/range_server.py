"""A local HTTP server with ranges and validators that cuts, throttles and misbehaves as configured."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RANGE = re.compile(r"bytes=(\d+)-(\d*)")
CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Request:
    """One received request."""

    start: int
    end: int | None
    has_range: bool
    headers: dict[str, str]


@dataclass
class Behaviour:
    """Behaviour of the server; may be changed between or during requests."""

    #: Bytes of a body after which the connection is cut; None never cuts.
    cut_after: int | None = None
    #: Connections that are cut before the server answers normally; None cuts each.
    cuts_left: int | None = None
    ignores_ranges: bool = False
    has_validator: bool = True
    announces_ranges: bool = True
    #: Pause after each 64 KiB.
    pause_seconds: float = 0
    #: Event to wait for before each 64 KiB beyond ``gate_at``.
    gate: threading.Event | None = None
    gate_at: int = 0


class RangeServer:
    """Serves one content at every path of a loopback port."""

    def __init__(self, content: bytes | Content) -> None:
        self.content: Any = content
        self.behaviour = Behaviour()
        self.requests: list[Request] = []
        self.sent_bytes = 0
        #: Responses of an earlier generation end at once.
        self._age = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/model.bin"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def sha256(self) -> str:
        """Digest of the content."""
        if isinstance(self.content, Content):
            return self.content.sha256
        return hashlib.sha256(self.content).hexdigest()

    @property
    def starts(self) -> list[int]:
        """Start offset of each request."""
        return [request.start for request in self.requests]

    def count_anew(self) -> None:
        """End the open responses and reset the counters of bytes and requests."""
        with self._lock:
            self._age += 1
            self.requests, self.sent_bytes = [], 0

    def stop(self) -> None:
        """Stop serving."""
        if self.behaviour.gate is not None:
            self.behaviour.gate.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        behaviour, content = self.behaviour, self.content
        etag = f'"{self.sha256[:16]}"'
        wanted = RANGE.fullmatch(handler.headers.get("Range", ""))
        headers = {key.lower(): value for key, value in handler.headers.items()}
        start, end = (int(wanted[1]), int(wanted[2]) + 1 if wanted[2] else None) if wanted else (0, None)
        self.requests.append(Request(start, end, wanted is not None, headers))
        if behaviour.ignores_ranges or headers.get("if-range", etag) != etag:
            wanted, start, end = None, 0, None
        end = len(content) if end is None else min(end, len(content))
        if wanted and start >= len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if wanted else 200)
        handler.send_header("Content-Length", str(end - start))
        if behaviour.announces_ranges and not behaviour.ignores_ranges:
            handler.send_header("Accept-Ranges", "bytes")
        if behaviour.has_validator:
            handler.send_header("ETag", etag)
        if wanted:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        handler.end_headers()
        cut_at = self._cut_at(start, end)
        try:
            self._send(handler, content, start, cut_at)
        except OSError:
            handler.close_connection = True
        if cut_at < end:
            handler.close_connection = True

    def _cut_at(self, start: int, end: int) -> int:
        behaviour = self.behaviour
        with self._lock:
            if behaviour.cut_after is None or behaviour.cuts_left == 0 or start + behaviour.cut_after >= end:
                return end
            if behaviour.cuts_left is not None:
                behaviour.cuts_left -= 1
        return start + behaviour.cut_after

    def _send(self, handler: BaseHTTPRequestHandler, content: Any, start: int, end: int) -> None:
        age = self._age
        for position in range(start, end, CHUNK_BYTES):
            behaviour = self.behaviour
            if behaviour.gate is not None and position >= behaviour.gate_at:
                behaviour.gate.wait(60)
            if self._age != age:
                handler.close_connection = True
                return
            piece = content[position : min(end, position + CHUNK_BYTES)]
            handler.wfile.write(piece)
            with self._lock:
                self.sent_bytes += len(piece) if self._age == age else 0
            if behaviour.pause_seconds:
                time.sleep(behaviour.pause_seconds)


class Content:
    """Large content without its memory: one repeated block, each time with its number in front."""

    BLOCK_BYTES = 1 << 20

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._block = hashlib.shake_256(b"content").digest(self.BLOCK_BYTES)
        digest, position = hashlib.sha256(), 0
        while position < size_bytes:
            digest.update(self[position : min(size_bytes, position + self.BLOCK_BYTES)])
            position += self.BLOCK_BYTES
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, wanted: slice) -> bytes:
        pieces, position = [], wanted.start
        while position < wanted.stop:
            number, offset = divmod(position, self.BLOCK_BYTES)
            block = number.to_bytes(8, "big") + self._block[8:]
            piece = block[offset : offset + wanted.stop - position]
            pieces.append(piece)
            position += len(piece)
        return b"".join(pieces)


Serve = Callable[..., RangeServer]
