"""The Host headers that a server without a password accepts.

This protects against DNS rebinding: a web site can resolve its own name to 127.0.0.1, and a browser on
this machine then attributes our answers to that site. The Host header still names the site.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["AllowedHosts", "has_ambiguous_length", "is_loopback"]

#: Names by which this machine reaches itself.
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
