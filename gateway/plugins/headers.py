"""Which headers cross between a client and a plugin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import httpx
from starlette.types import Scope

from broker_config.settings import PluginAccess

__all__ = ["request_headers", "response_headers"]

RawHeaders = list[tuple[bytes, bytes]]

#: Of one connection, not of the message (RFC 9110, section 7.6.1).
_HOP_BY_HOP: Final = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
        b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect",
    )
)  # fmt: skip
#: What intermediaries state, which a client must not.
_OF_PROXIES: Final = frozenset((b"forwarded", b"x-real-ip", b"x-client-ip", b"via"))
_SECRETS: Final = frozenset((b"authorization", b"cookie", b"x-webhook-token"))
#: Answers would set these for the whole origin, not for the plugin's part of it.
_OF_ORIGIN: Final = frozenset(
    (
        b"strict-transport-security", b"clear-site-data", b"service-worker-allowed", b"alt-svc",
        b"origin-agent-cluster", b"public-key-pins", b"nel", b"report-to", b"reporting-endpoints",
    )
)  # fmt: skip
_OPENS_CORS: Final = b"access-control-"
#: Secrets of the gateway itself, which no plugin receives.
_OWN_KEY: Final = b"bearer nk_"
_OWN_COOKIES: Final = (b"nekro_", b"__Host-nekro_", b"__Secure-nekro_")
#: A document with it has an origin of its own and runs no script.
_INERT: Final = (b"content-security-policy", b"sandbox")


def request_headers(scope: Scope, access: PluginAccess, *, prefix: str) -> RawHeaders:
    """Return the headers of a request for its plugin.

    Args:
        prefix: path below which the plugin is served.
    """
    gone = _gone(scope["headers"])
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in gone
        and name not in _OF_PROXIES
        and not name.startswith((b"x-nekro-", b"x-forwarded-"))
        and (access is PluginAccess.PLUGIN or name not in _SECRETS)
    ]
    if access is PluginAccess.PLUGIN:
        kept = [*_without_own_secrets(kept)]
    client = scope.get("client")
    kept += [
        (b"x-forwarded-proto", str(scope.get("scheme", "http")).encode("latin-1")),
        (b"x-forwarded-prefix", prefix.encode("latin-1")),
    ]
    if client:
        kept.append((b"x-forwarded-for", str(client[0]).encode("latin-1")))
    return kept


def response_headers(headers: httpx.Headers, access: PluginAccess) -> RawHeaders:
    """Return the headers of a plugin's answer for its client."""
    raw = headers.raw
    gone = _gone(raw) | _OF_ORIGIN
    kept = [(name, value) for name, value in raw if name not in gone and not name.startswith(b"x-nekro-")]
    if access is not PluginAccess.PLUGIN:
        kept = [(name, value) for name, value in kept if name != b"set-cookie"]
    if access is PluginAccess.KEY:
        # It was not decided that it may act as a page of the API's origin.
        kept = [(n, v) for n, v in kept if n != _INERT[0] and not n.startswith(_OPENS_CORS)]
        kept += [_INERT, (b"x-content-type-options", b"nosniff")]
    return kept


def _gone(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the names of headers that belong to the connection, also those that it names."""
    named = [
        name.strip().lower()
        for header, value in headers
        if header == b"connection"
        for name in value.split(b",")
    ]
    # `Connection` must not name the headers that give the body its length and the request its host.
    return _HOP_BY_HOP.union(named) - {b"content-length", b"host", b"content-type"}


def _without_own_secrets(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"authorization" and value.lower().startswith(_OWN_KEY):
            continue
        if name == b"cookie":
            cookies = [c for c in value.split(b";") if not c.strip().startswith(_OWN_COOKIES)]
            value = b";".join(cookies).strip()
            if not value:
                continue
        yield name, value
