"""Which addresses a download may reach, decided on the address that is really connected to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import Final

import httpcore

from nekro_agent.errors import DownloadError, DownloadRefusedError, SettingsError
from nekro_agent.tools.download_socket import GatheringStream

__all__ = ["AddressPolicy", "CheckedBackend"]

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

#: NAT64: the last 32 bits are an IPv4 address (RFC 6052).
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")


class AddressPolicy:
    """Admits public addresses, and the private ones that were allowed by name or network."""

    def __init__(self, allow_private: Iterable[str] = ()) -> None:
        """Take host names (``models.internal``), addresses and networks (``10.0.0.0/8``).

        Raises:
            SettingsError: an entry looks like a network and is none.
        """
        self._hosts: set[str] = set()
        self._networks: list[IPNetwork] = []
        for entry in allow_private:
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError as exc:
                if "/" in entry:
                    raise SettingsError(
                        f"NEKRO_DOWNLOADS__ALLOW_PRIVATE: {entry!r} is no network; "
                        "write one like 10.0.0.0/8, or a host name"
                    ) from exc
                self._hosts.add(entry.lower().rstrip("."))

    def admits(self, host: str, address: str) -> bool:
        """Whether ``host``, resolved to ``address``, may be connected to."""
        if host.lower().rstrip(".") in self._hosts:
            return True
        ip = ipaddress.ip_address(address.split("%", 1)[0])
        return any(ip in network for network in self._networks) or all(map(_is_public, _meant_by(ip)))

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the admitted addresses of ``host``, best first.

        Raises:
            DownloadError: the name does not resolve.
            DownloadRefusedError: it resolves to addresses that may not be reached only.
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
                "refused. If it is meant, list the host or network in NEKRO_DOWNLOADS__ALLOW_PRIVATE"
            )
        return admitted


def _meant_by(ip: IPAddress) -> list[IPAddress]:
    """Return the address itself and every IPv4 address that is embedded in it."""
    meant: list[IPAddress] = [ip]
    if isinstance(ip, ipaddress.IPv6Address):
        teredo = ip.teredo[1] if ip.teredo else None
        nat64 = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None
        if ip.ipv4_mapped is not None or nat64 is not None:
            meant = []  # nothing but another spelling of an IPv4 address
        meant += [inner for inner in (ip.ipv4_mapped, ip.sixtofour, teredo, nat64) if inner is not None]
    return meant


def _is_public(ip: IPAddress) -> bool:
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections to admitted addresses only.

    The name is resolved here and the connection goes to the address that was checked, so a
    name that changes its answer between check and use (DNS rebinding) gains nothing.
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
        """Refuse: a URL must not lead to a local socket."""
        raise DownloadRefusedError(f"Unix socket {path!r} is no download source")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await asyncio.sleep(seconds)
