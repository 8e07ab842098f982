"""What reaches a plugin: the operator's decision per plugin, the headers, and the worker."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

import httpx
from fastapi import Request
from starlette.types import Scope as AsgiScope

from broker_config.settings import GatewaySettings, PluginAccess
from nekro.app.http_server import is_loopback
from nekro.gateway.dependencies import identity_of
from nekro.operations.actor import Identity, RefusedError, Scope
from nekro.plugins.entries import PluginEntry
from nekro_agent.durations import FRESH_SECONDS
from storage.catalogue import Site
from storage.engine import Database

__all__ = [
    "Sites",
    "admit",
    "is_reachable",
    "not_served",
    "plugin_headers",
    "request_headers",
    "response_headers",
]


def is_reachable(settings: GatewaySettings, plugin: PluginEntry) -> bool:
    """Whether requests may reach a plugin at all: it is enabled and not closed."""
    return plugin.enabled and settings.access_to(plugin.key) is not PluginAccess.CLOSED


async def admit(request: Request, access: PluginAccess) -> Identity | None:
    """Return whose request it is if it may reach a plugin with this access; None: unknown.

    Raises:
        RefusedError: 401 or 403, it needs a key with the scope ``call``; 404, the plugin is closed; 429, too
            many requests.
    """
    if access is PluginAccess.CLOSED:
        raise not_served(request.url.path)
    try:
        identity = await identity_of(request)
        identity.require(Scope.CALL)
    except RefusedError as exc:
        if access is PluginAccess.KEY or exc.status == HTTPStatus.TOO_MANY_REQUESTS:
            raise
        return None
    return identity


def not_served(path: str) -> RefusedError:
    """Return the same error for a plugin that does not exist, is disabled or is closed."""
    return RefusedError(
        HTTPStatus.NOT_FOUND,
        "not_found",
        f"nothing is served at {path}; an operator opens a plugin with NEKRO_GATEWAY__PLUGIN_HTTP",
    )


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
#: Plugins receive them only if they check requests themselves.
_SECRETS: Final = frozenset((b"authorization", b"cookie", b"x-webhook-token"))
#: Answers would set these for the whole origin, not for the plugin's part of it.
_OF_ORIGIN: Final = frozenset(
    (
        b"strict-transport-security", b"clear-site-data", b"service-worker-allowed", b"alt-svc",
        b"origin-agent-cluster", b"public-key-pins", b"nel", b"report-to", b"reporting-endpoints",
    )
)  # fmt: skip

_OPENS_CORS: Final = b"access-control-"
#: Secrets of the gateway itself, which no plugin receives. A key also counts if its secret is cut.
_OWN_KEY: Final = re.compile(rb"nk_[0-9a-f]{16}_")

_OWN_COOKIES: Final = (b"nekro_", b"__Host-nekro_", b"__Secure-nekro_")
#: In the answer, in the gateway's log and in the worker's.
_REQUEST_ID: Final = b"x-request-id"
#: A document with it has an origin of its own and runs no script.
_INERT: Final = (b"content-security-policy", b"sandbox")


def request_headers(scope: AsgiScope, access: PluginAccess, *, prefix: str) -> RawHeaders:
    """Return the headers of a request for its plugin.

    Args:
        prefix: path below which the plugin is served.
    """
    gone = _gone(scope["headers"]) | _OF_PROXIES
    kept = [
        (name, value)
        for name, value in plugin_headers(scope["headers"], access)
        if name not in gone and name != _REQUEST_ID and not name.startswith(b"x-forwarded-")
    ]
    request_id = scope["state"]["request_id"]
    client = scope.get("client")
    kept += [
        (b"x-forwarded-proto", str(scope.get("scheme", "http")).encode("latin-1")),
        (b"x-forwarded-prefix", prefix.encode("latin-1")),
        (_REQUEST_ID, request_id.encode("latin-1")),
    ]
    if client:
        kept.append((b"x-forwarded-for", str(client[0]).encode("latin-1")))
    return kept


def plugin_headers(headers: Iterable[tuple[bytes, bytes]], access: PluginAccess) -> RawHeaders:
    """Return the headers of a request without identities that a client states, and without secrets.

    Keys and sessions of the gateway reach no plugin. Other tokens and cookies reach one with the access
    ``plugin``, because it checks requests itself.
    """
    kept = (
        (name, _without_own_cookies(value) if name == b"cookie" else value)
        for name, value in headers
        if not name.startswith(b"x-nekro-") and (access is PluginAccess.PLUGIN or name not in _SECRETS)
    )
    return [
        (name, value) for name, value in kept if not _OWN_KEY.search(value) and (value or name != b"cookie")
    ]


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


def _without_own_cookies(value: bytes) -> bytes:
    cookies = (cookie.strip() for cookie in value.split(b";"))
    return b"; ".join(
        cookie
        for cookie in cookies
        if cookie and not cookie.startswith(_OWN_COOKIES) and not _OWN_KEY.search(cookie)
    )


class Sites:
    """Addresses by plugin, read from the catalogue at most once per second."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[float, list[Site]]] = {}

    async def of(self, plugin_key: str) -> list[Site]:
        """Return where a plugin is served, in random order; loopback addresses of this host only.

        Raises:
            RefusedError: 503, no worker serves it.
        """
        read_at, sites = self._known.get(plugin_key, (0.0, []))
        if not sites or time.monotonic() - read_at > FRESH_SECONDS:
            async with self._database.read() as transaction:
                sites = await transaction.catalogue.sites_of(plugin_key)
            self._known[plugin_key] = (time.monotonic(), sites)
        here = socket.gethostname()
        usable = [one for one in sites if one.host == here or not is_loopback(one.address.rpartition(":")[0])]
        if not usable:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "no_worker", _why(sites), headers={"Retry-After": "2"}
            )
        return random.sample(usable, len(usable))

    def forget(self, plugin_key: str) -> None:
        """Read the addresses of a plugin again at the next request."""
        self._known.pop(plugin_key, None)


def _why(sites: list[Site]) -> str:
    if sites:
        hosts = ", ".join(sorted({one.host for one in sites}))
        return (
            f"the workers of {hosts} serve routes of plugins to their own host only; "
            "set NEKRO_WORKERS__HTTP_ADDRESS there"
        )
    return "no worker serves the routes of this plugin; lane `long` does, or the owner of a pinned plugin"
