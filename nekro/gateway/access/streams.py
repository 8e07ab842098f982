"""Limits of the streams that one key, and one address, have open in this process."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from broker_config.settings import GatewaySettings
from nekro.gateway.problems import ProblemError

__all__ = ["OpenStreams"]

#: When a refused client may try again; when a stream ends cannot be known.
_RETRY_SECONDS: Final = 5
#: A network that one host or home has as a whole.
_IPV6_PREFIX: Final = 64


class OpenStreams:
    """Counts open streams; one instance per process."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Count from 0; the limits are ``streams_per_key`` and ``streams_per_address``."""
        self._settings = settings
        self._keys: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()

    @contextmanager
    def counted(self, *, key_id: str | None, host: str | None) -> Iterator[None]:
        """Count a stream inside the block.

        Args:
            key_id: None for a stream without a key.
            host: address of the client; None on a Unix socket.

        Raises:
            ProblemError: 429, the key or the address has as many as it may have.
        """
        address = None if host is None else _network(host)
        _require(self._keys, key_id, self._settings.streams_per_key, "the key")
        _require(self._addresses, address, self._settings.streams_per_address, "the address")
        taken = [(c, name) for c, name in ((self._keys, key_id), (self._addresses, address)) if name]
        for counter, name in taken:
            counter[name] += 1
        try:
            yield
        finally:
            for counter, name in taken:
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]


def _require(counter: Counter[str], name: str | None, limit: int, what: str) -> None:
    if name is not None and limit and counter[name] >= limit:
        raise ProblemError(
            HTTPStatus.TOO_MANY_REQUESTS,
            "too_many_streams",
            f"{what} has {limit} open streams of this gateway; close some",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )


def _network(host: str) -> str:
    """Return the address, or of IPv6 its network, whose addresses one client can use in turn."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
