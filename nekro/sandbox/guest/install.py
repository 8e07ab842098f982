"""Install one requirement inside a builder sandbox; this file is the code of that run.

The names below are stubs of that run: ``index_page`` and ``wheel`` call the host. pip needs an index
at an HTTP address, so this file serves one on loopback.
"""

import http.server
import os
import runpy
import shutil
import socketserver
import sys
import tempfile
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # inside, these are names of the run
    from nekro.sandbox.guest.channel import MethodError

    def index_page(project: str) -> str: ...
    def wheel(number: int) -> str: ...
    def requirement() -> str: ...


TARGET = "/app/shared/layer"
WHEELS = "/app/uploads"


class Index(http.server.BaseHTTPRequestHandler):
    """Passes the installer's requests to the host."""

    def do_GET(self) -> None:
        """Serve ``/simple/<project>/`` and ``/files/<number>/<name>``."""
        kind, _, rest = self.path.strip("/").partition("/")
        try:
            if kind == "simple":
                page = index_page(rest.strip("/")).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)
            else:
                self.send_wheel(wheel(int(rest.partition("/")[0])))
        except MethodError as exc:
            print(exc, file=sys.stderr)
            self.send_error(502)

    def send_wheel(self, name: str) -> None:
        """Send a wheel that the host stored in the uploads area."""
        path = os.path.join(WHEELS, name)
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(os.path.getsize(path)))
        self.end_headers()
        with open(path, "rb") as file:
            shutil.copyfileobj(file, self.wfile)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class Server(socketserver.ThreadingTCPServer):
    """A threading server that does not look up its own host name, as ``HTTPServer`` does."""

    daemon_threads = True


server = Server(("127.0.0.1", 0), Index)
threading.Thread(target=server.serve_forever, daemon=True).start()
# pip unpacks wheels in TMPDIR; /tmp is too small.
os.mkdir("/app/shared/tmp")
os.environ["TMPDIR"] = tempfile.tempdir = "/app/shared/tmp"
sys.argv = [
    "pip", "--isolated", "--no-input", "--no-cache-dir", "--disable-pip-version-check", "install",
    "--quiet", "--no-compile", "--only-binary", ":all:", "--target", TARGET,
    "--retries", "0", "--report", "/app/shared/report.json",
    "--index-url", f"http://127.0.0.1:{server.server_address[1]}/simple", requirement(),
]  # fmt: skip
runpy.run_module("pip", run_name="__main__", alter_sys=True)
