"""The key of a gateway on this host: `nekro up` writes it to ``secrets/api.key`` of the data directory.

Another user of the host can listen on the gateway's port while no gateway runs. So the key is sent only while
every listener of the address belongs to the owner of the file, or to root.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import httpx

from nekro_client.errors import ClientError

__all__ = ["LocalKeyAuth", "is_on_this_host"]

_FILE: Final = Path("secrets", "api.key")
#: State of a listening socket. Source: Linux, ``include/net/tcp_states.h``.
_LISTEN: Final = "0A"
_LOOPBACK_NAMES: Final = {"localhost": ("127.0.0.1", "::1")}
_WILDCARDS: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_MOST_BYTES: Final = 4096


class LocalKeyAuth(httpx.Auth):
    """Adds the key to requests for a gateway on this host."""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Send the request, with the key if there is one and the listener may have it."""
        has_key = _add_key(request)
        response = yield request
        # A gateway that starts may begin to listen between the look at the listeners and the connection.
        is_late = response.status_code == httpx.codes.UNAUTHORIZED and not has_key
        if is_late and isinstance(request.stream, httpx.ByteStream) and _add_key(request):
            yield request


def _add_key(request: httpx.Request) -> bool:
    """Add the key if there is one and the listener may have it; returns whether it did."""
    found = _read_key() if is_on_this_host(request.url) else None
    if found is None or not _listeners(request.url) <= {found[1], 0}:
        return False
    request.headers["authorization"] = f"Bearer {found[0]}"
    return True


def is_on_this_host(url: httpx.URL) -> bool:
    """Whether a URL names a loopback address."""
    return bool(_addresses(url.host))


def _read_key() -> tuple[str, int] | None:
    """Return the key and the owner of its file; None if there is no file.

    Raises:
        ClientError: others can read or change the file.
    """
    path = Path(os.environ.get("NEKRO_DATA_DIR") or "data").expanduser() / _FILE
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        # Root may use the file of an ordinary user, who could send the key as well.
        is_own = info.st_uid in (0, os.geteuid()) or os.geteuid() == 0
        if not stat.S_ISREG(info.st_mode) or not is_own or info.st_mode & 0o077:
            raise ClientError(f"{path} is not a file of this user that only this user can read; delete it")
        text = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    return (text, info.st_uid) if text else None


def _addresses(host: str) -> tuple[str, ...]:
    """Return the loopback addresses of a host name or address; none if it is another host."""
    if host.lower() in _LOOPBACK_NAMES:
        return _LOOPBACK_NAMES[host.lower()]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ()
    return (str(address),) if address.is_loopback else ()


def _listeners(url: httpx.URL) -> set[int]:
    """Return the users whose processes listen on the address of a URL; -1 where the kernel does not tell."""
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    wanted = {*_addresses(url.host), *_WILDCARDS}
    users: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text("ascii").split("\n")[1:]
        except FileNotFoundError:
            continue  # no IPv6
        except OSError:
            return {-1}
        users |= {user for address, at, user in _listening(lines) if at == port and address in wanted}
    return users or {-1}


def _listening(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield address, port and user of the listening sockets in a table of the kernel."""
    for line in lines:
        fields = line.split()
        if len(fields) < 8 or fields[3] != _LISTEN:
            continue
        address, _, port = fields[1].partition(":")
        # Words of 32 bits in the byte order of the host.
        words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
        packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
        found = ipaddress.ip_address(packed)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        yield str(mapped or found), int(port, 16), int(fields[7])
