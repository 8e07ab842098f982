"""A small HTTP server on threads of its own, for probes and Prometheus, and rules for requests of any server.

Probes are open. On a loopback port, which every user of the machine reaches, other pages need a key, and only
requests for a loopback name are answered. This protects against DNS rebinding: a web site can resolve its own
name to 127.0.0.1, and a browser on this machine then attributes our answers to that site, but the Host header
still names the site. On other addresses the network controls access."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import re
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from broker_config.secret_files import monitoring_key
from nekro_agent.errors import ServiceError

__all__ = [
    "METRICS_TYPE",
    "AllowedHosts",
    "PageResponse",
    "PageServer",
    "Pages",
    "has_ambiguous_length",
    "is_loopback",
]


#: Names of this machine for itself.
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
#: ``name``, ``name:port``, ``[address]`` or ``[address]:port``.
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+))(?::[0-9]{1,5})?")


class AllowedHosts:
    """The loopback names and the configured ones."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names`` are host names and addresses, without port and brackets."""
        self._names = frozenset(map(_normal, (*LOOPBACK_NAMES, *names)))

    def admits(self, headers: Sequence[str]) -> bool:
        """Whether a request may be answered.

        Args:
            headers: values of its Host headers. No header is admitted, because every browser sends one.
        """
        if not headers:
            return True
        match = _HOST.fullmatch(headers[0])
        return len(headers) == 1 and match is not None and _normal(match[1] or match[2]) in self._names


def is_loopback(address: str) -> bool:
    """Whether a server that listens on ``address`` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return _normal(address) == "localhost"


def _normal(name: str) -> str:
    name = name.lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def has_ambiguous_length(scope: Mapping[str, Any]) -> bool:
    """Whether two servers may see different ends of a request's body; such a request is refused.

    Source: RFC 9112, section 6.1.
    """
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" not in names:
        return False
    return b"content-length" in names or scope["http_version"] == "1.0"


#: Content type that Prometheus expects.
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Paths that need no key.
_PROBES: Final = frozenset({"/livez", "/readyz"})

_NO_KEY: Final = (
    b"send `Authorization: Bearer` and the text of secrets/monitoring.key of the data directory\n"
)

_REFUSAL: Final = b"this port answers requests for localhost, 127.0.0.1 and [::1] only\n"
#: Number of ports to try, since several processes of one host may share a setting.
_PORTS: Final = 64


@dataclass(frozen=True, kw_only=True)
class PageResponse:
    """A response."""

    body: bytes
    type: str = METRICS_TYPE
    status: HTTPStatus = HTTPStatus.OK


#: Path to a function that makes the page; called on a thread of the server, so it may block.
Pages = Mapping[str, Callable[[], PageResponse]]


class PageServer:
    """Serves pages until closed."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        server.daemon_threads = True
        self._thread = threading.Thread(target=server.serve_forever, name="nekro-pages", daemon=True)
        self._thread.start()

    @classmethod
    def on_socket(cls, path: Path, pages: Pages) -> PageServer:
        """Listen on a Unix socket; the permissions of its directory control access."""
        path.unlink(missing_ok=True)
        return cls(_UnixServer(path, _handler(pages)))

    @classmethod
    def on_port(
        cls, address: str, port: int, pages: Pages, *, data_dir: Path, tries: int = _PORTS
    ) -> PageServer:
        """Listen on a TCP port, or on the first free one after it.

        Args:
            data_dir: where the key for a loopback port is.

        Raises:
            ServiceError: none of the ports is free, or the address is not one of this host.
            SettingsError: the key cannot be read.
        """
        kind = _Server6 if ":" in address else ThreadingHTTPServer
        hosts = AllowedHosts((address,)) if is_loopback(address) else None
        key = monitoring_key(data_dir)[1] if hosts is not None else None
        for candidate in range(port, min(port + tries, 65536)):
            try:
                return cls(kind((address, candidate), _handler(pages, hosts, key)))
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise ServiceError(f"cannot listen on {address}:{candidate}: {exc.strerror}") from exc
        raise ServiceError(f"port {port} of {address} and the {tries - 1} after it are taken; choose another")

    @property
    def port(self) -> int:
        """The port that it listens on; 0 for a Unix socket."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class _UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX

    def __init__(self, path: Path, handler: type[BaseHTTPRequestHandler]) -> None:
        self._path = str(path)
        super().__init__(("", 0), handler)

    def server_bind(self) -> None:
        """Bind the path; the base class would look up a host name."""
        self.socket.bind(self._path)
        self.server_name, self.server_port = "local", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; handlers expect a host and a port as its address."""
        connection, _ = self.socket.accept()
        return connection, ("local", 0)


def _handler(
    pages: Pages, hosts: AllowedHosts | None = None, key: str | None = None
) -> type[BaseHTTPRequestHandler]:
    """Create the request handler; without ``hosts`` and ``key`` it answers every request."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            make = pages.get(path)
            if hosts is not None and not hosts.admits(self.headers.get_all("Host", [])):
                self._send(PageResponse(body=_REFUSAL, status=HTTPStatus.MISDIRECTED_REQUEST))
            elif key is not None and path not in _PROBES and not self._has(key):
                self._send(PageResponse(body=_NO_KEY, status=HTTPStatus.UNAUTHORIZED))
            elif make is None:
                known = f"there is {', '.join(pages)}\n"
                self._send(PageResponse(body=known.encode(), status=HTTPStatus.NOT_FOUND))
            else:
                self._send(make())

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because probes come every few seconds."""

        def _has(self, key: str) -> bool:
            given = self.headers.get_all("Authorization", [])
            wanted = f"Bearer {key}".encode()
            return len(given) == 1 and hmac.compare_digest(given[0].encode("utf-8", "replace"), wanted)

        def _send(self, page: PageResponse) -> None:
            self.send_response(page.status)
            if page.status == HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", 'Bearer realm="nekro"')
            self.send_header("Content-Type", page.type)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

    return Handler
