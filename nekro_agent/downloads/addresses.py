"""Where a download may go: addresses, checked on the actual connection, and redirects.

Log-ins and cookies go along with a redirect to the same server only.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import re
import socket
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Final

from nekro_agent.errors import DownloadError, DownloadRefusedError, SettingsError

__all__ = [
    "AddressPolicy",
    "Cookies",
    "checked_url",
    "headers_after",
    "is_same_server",
    "login_of",
    "redirected",
    "shown_url",
]


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

#: IPv4 that is not globally reachable (IANA IPv4 Special-Purpose Address Registry, RFC 6890), multicast and
#: reserved. Listed here because ``ipaddress`` has different definitions of global in different Pythons.
_NOT_PUBLIC_4: Final = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by carriers
            "127.0.0.0/8",  # loopback
            "169.254.0.0/16",  # link-local
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # deprecated relays of 6to4
            "192.168.0.0/16",  # private
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, broadcast
        ),
    )
)
#: The only IPv6 range allocated as global unicast (RFC 4291). Outside of it are loopback, discard-only
#: (100::/64), local NAT64 (64:ff9b:1::/48), segment ids (5f00::/16), unique local, link-local, site-local
#: (fec0::/10) and multicast.
_GLOBAL_6: Final = ipaddress.IPv6Network("2000::/3")
#: Parts of it that are not globally reachable (IANA IPv6 Special-Purpose Address Registry).
_NOT_PUBLIC_6: Final = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocol assignments, among them Teredo, benchmarks and ORCHID
            "2001:db8::/32",  # documentation
            "3fff::/20",  # documentation
        ),
    )
)
#: IPv6 forms of IPv4 addresses, and the number of bits after the IPv4 part: mapped, NAT64 (RFC 6052), 6to4.
_EMBEDDED_4: Final = (
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),
    (ipaddress.IPv6Network("2002::/16"), 80),
)


class AddressPolicy:
    """Admits public addresses, and private ones that are allowed by name or network."""

    def __init__(
        self, allow_private: Iterable[str] = (), *, setting: str = "NEKRO_DOWNLOADS__ALLOW_PRIVATE"
    ) -> None:
        """Parse the entries.

        Args:
            allow_private: host names (``models.internal``), addresses and networks (``10.0.0.0/8``).
            setting: variable with these entries, for errors.

        Raises:
            SettingsError: an entry looks like a network but is not one.
        """
        self._setting = setting
        self._hosts: set[str] = set()
        self._networks: list[IPNetwork] = []
        for entry in allow_private:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError as exc:
                if "/" in entry:
                    raise SettingsError(
                        f"{setting}: {entry!r} is not a network; write one like 10.0.0.0/8, or a host name"
                    ) from exc
                self._hosts.add(entry.lower().rstrip("."))

    def admits(self, host: str, address: str) -> bool:
        """Whether a connection to ``host``, resolved to ``address``, is allowed."""
        if host.lower().rstrip(".") in self._hosts:
            return True
        ip = ipaddress.ip_address(address.split("%", 1)[0])
        return any(ip in network for network in self._networks) or _is_public(ip)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the admitted addresses of ``host``, best first.

        Raises:
            DownloadError: the name does not resolve.
            DownloadRefusedError: none of its addresses is allowed.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as exc:
            raise DownloadError(f"host {host!r} does not resolve: {exc}") from exc
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        admitted = [address for address in addresses if self.admits(host, address)]
        if not admitted:
            raise DownloadRefusedError(
                f"host {host!r} is at {', '.join(addresses)}: private, loopback and link-local addresses are "
                f"refused. To allow it, list the host or network in {self._setting}"
            )
        return admitted


def _is_public(ip: IPAddress) -> bool:
    """Whether an address is globally reachable; decided by the IPv4 address if it embeds one."""
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in _NOT_PUBLIC_4)
    for network, bits in _EMBEDDED_4:
        if ip in network:
            return _is_public(ipaddress.IPv4Address(int(ip) >> bits & 0xFFFFFFFF))
    return ip in _GLOBAL_6 and not any(ip in network for network in _NOT_PUBLIC_6)


#: Headers that must not be sent to another server after a redirect.
_PRIVATE_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization"})

_LOGIN: Final = re.compile(r"(?<=//)[^/?#]*@")

_MOST_COOKIES: Final = 50

_MOST_COOKIE_CHARS: Final = 4096

_COOKIE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)=([\x21-\x3a\x3c-\x7e]*)", re.ASCII)

_EXPIRED: Final = re.compile(r";\s*max-age\s*=\s*(?:0|-\d+)\s*(?:;|$)", re.ASCII | re.IGNORECASE)


def checked_url(url: str) -> tuple[str, str]:
    """Return an acceptable URL in ASCII, without log-in and fragment, and its host.

    Raises:
        DownloadRefusedError: it is not an http or https URL.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = (parts.hostname or "").encode("ascii" if ":" in (parts.hostname or "") else "idna").decode()
    except ValueError as exc:
        raise DownloadRefusedError(f"{shown_url(url)!r} is not a URL: {exc}") from exc
    if parts.scheme not in ("http", "https") or not host:
        raise DownloadRefusedError(f"{shown_url(url)!r} is not an http:// or https:// URL")
    bracketed = f"[{host}]" if ":" in host else host
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~?")
    return urllib.parse.urlunsplit((parts.scheme, bracketed + port, path, query, "")), host


def shown_url(url: str) -> str:
    """Return a URL, or a text that should be one, without its log-in, for errors and logs."""
    return _LOGIN.sub("", url)


def login_of(url: str) -> Mapping[str, str]:
    """Return the header that carries the log-in of a URL; empty if it has none."""
    user_info, separator, _ = urllib.parse.urlsplit(url).netloc.rpartition("@")
    if not separator:
        return {}
    user, _, password = user_info.partition(":")
    plain = b":".join(map(urllib.parse.unquote_to_bytes, (user, password)))
    return {"Authorization": f"Basic {base64.b64encode(plain).decode()}"}


def redirected(url: str, location: bytes) -> tuple[str, Mapping[str, str]]:
    """Return the URL that a ``Location`` header leads to, and the header of a log-in for the same server.

    The header should be ASCII; servers send names in UTF-8, and in other encodings, too.

    Raises:
        DownloadRefusedError: it is no acceptable URL.
    """
    try:
        text = location.decode()
    except UnicodeDecodeError:
        text = "".join(chr(byte) if byte < 0x80 else f"%{byte:02X}" for byte in location)
    try:
        target = urllib.parse.urljoin(url, text.strip())
        checked, login = checked_url(target)[0], login_of(target)
    except ValueError as exc:
        reason = f"{url} redirects to {shown_url(text)[:500]!r}, which is not a URL: {exc}"
        raise DownloadRefusedError(reason) from exc
    return checked, login if is_same_server(url, checked) else {}


def is_same_server(source: str, target: str) -> bool:
    """Whether a redirect leads to the same host and port, or from plain HTTP to HTTPS of the same host."""
    old, new = urllib.parse.urlsplit(source), urllib.parse.urlsplit(target)
    kept = (old.scheme, old.port) == (new.scheme, new.port)
    is_secured = (old.scheme, old.port, new.scheme, new.port) == ("http", None, "https", None)
    return old.hostname == new.hostname and (kept or is_secured)


def headers_after(
    source: str, target: str, headers: Mapping[str, str], login: Mapping[str, str]
) -> dict[str, str]:
    """Return the headers of the request that follows a redirect."""
    if not is_same_server(source, target):
        return {name: value for name, value in headers.items() if name.lower() not in _PRIVATE_HEADERS}
    if login:
        headers = {name: value for name, value in headers.items() if name.lower() != "authorization"}
    return {**headers, **login}


class Cookies:
    """Cookies that servers set in one chain of redirects; each goes back to its own server only."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], str] = {}

    def store(self, url: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Keep the cookies of an answer; attributes besides ``Max-Age`` do not matter within seconds."""
        server = _server_of(url)
        for name, value in headers:
            text = value.decode("latin-1")
            match = _COOKIE.match(text.lstrip()) if name.lower() == b"set-cookie" else None
            if match is None or len(match[0]) > _MOST_COOKIE_CHARS:
                continue
            self._values.pop((server, match[1]), None)
            if not _EXPIRED.search(text) and len(self._values) < _MOST_COOKIES:
                self._values[server, match[1]] = match[2]

    def added_to(self, headers: Mapping[str, str], url: str) -> dict[str, str]:
        """Return the headers of a request with the cookies of its server, after those of the caller."""
        server = _server_of(url)
        own = [f"{name}={value}" for (owner, name), value in self._values.items() if owner == server]
        if not own:
            return dict(headers)
        given = [value for name, value in headers.items() if name.lower() == "cookie"]
        others = {name: value for name, value in headers.items() if name.lower() != "cookie"}
        return {**others, "Cookie": "; ".join([*given, *own])}


def _server_of(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
