"""The addresses that a download may reach, checked on the address of the actual connection."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

import httpcore

from nekro_agent.downloads.socket import GatheringStream
from nekro_agent.errors import DownloadError, DownloadRefusedError, SettingsError

__all__ = ["AddressPolicy", "CheckedBackend"]

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


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections only to admitted addresses.

    The name is resolved here and the connection uses the checked address, so a name that changes
    its answer between check and use (DNS rebinding) has no effect.
    """

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first admitted address that answers."""
        failure: Exception | None = None
        for address in await self._policy.resolve(host, port):
            try:
                return await GatheringStream.connect(
                    address,
                    port,
                    timeout_seconds=timeout,
                    local_address=local_address,
                    socket_options=socket_options,
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        raise DownloadError(f"host {host!r} does not accept connections: {failure}") from failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109  # the interface of httpcore
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Refuse, because a URL must not lead to a local socket."""
        raise DownloadRefusedError(f"Unix socket {path!r} is not a valid download source")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)
