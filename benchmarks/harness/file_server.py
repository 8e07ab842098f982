"""Serve one file over HTTP/1.1 with ranges; can cut connections and send slowly.

``python -m benchmarks.harness.file_server FILE [--cut-bytes N] [--bytes-per-second N] [--counts]`` prints
its port, then one line per request: the offset of the first requested byte; with ``--counts`` also, at its
end, a line with the bytes that the connection accepted.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["main"]

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_PIECE_BYTES = 1 << 20
_COUNTED_BUFFER_BYTES = 128 << 10


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--cut-bytes", type=int, default=0)
    parser.add_argument("--bytes-per-second", type=int, default=0)
    parser.add_argument("--counts", action="store_true")
    options = parser.parse_args()
    path: Path = options.file
    size = path.stat().st_size

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if options.counts:
                # What waits in this host's buffer has not left it.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _COUNTED_BUFFER_BYTES)
            wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted else 0
            end = int(wanted[2]) + 1 if wanted and wanted[2] else size
            # A single write, as connections are served by threads.
            os.write(1, f"{start}\n".encode())
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{size}"')
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            stop = min(end, start + options.cut_bytes) if options.cut_bytes else end
            self.sent = 0
            try:
                self._send(start, stop)
            except OSError:
                self.close_connection = True
            if options.counts:
                os.write(1, f"sent {self.sent}\n".encode())
            if stop < end:
                self.close_connection = True

        do_HEAD = do_GET

        def _send(self, start: int, end: int) -> None:
            begin = time.monotonic()
            with path.open("rb") as file:
                for position in range(start, end, _PIECE_BYTES):
                    self.sent += self.connection.sendfile(file, position, min(_PIECE_BYTES, end - position))
                    if options.bytes_per_second:
                        due = begin + (position - start) / options.bytes_per_second
                        time.sleep(max(0.0, due - time.monotonic()))

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
