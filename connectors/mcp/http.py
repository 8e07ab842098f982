"""The HTTP client of sessions: headers, OAuth, bounds on answers, and errors that end one request only."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final

import httpx2
from mcp.client.auth import TokenStorage
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from mcp_types import INTERNAL_ERROR

from connectors.mcp.declarations import OAuth, resolve
from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.durations import DEFER_SECONDS, FRESH_SECONDS
from nekro_agent.errors import DownloadError

__all__ = ["NOT_SENT", "OriginTransport", "auth_of", "http_client"]

#: Data of an error that says that the server did not receive the request.
NOT_SENT: Final = "nekro.not_sent"
#: Bytes of an answer that are read at once; then the loop gets time for others.
_BURST_BYTES: Final = 1 << 20
#: The coding of a body that is not encoded (RFC 9110, section 12.5.3).
_PLAIN: Final = "identity"
#: Longest time for connecting.
_CONNECT_SECONDS: Final = 10.0
#: Longest time without a byte of an answer.
_READ_SECONDS: Final = 300.0
#: Streams of events that a session opens without a pause. Servers end them and choose the pause, so after
#: these it is ``FRESH_SECONDS`` for each stream.
_MOST_STREAMS: Final = 10
_NO_IDLE: Final = httpx2.Limits(max_keepalive_connections=0)
_UNSENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class _TooLargeError(httpx2.StreamError):
    """An answer exceeds the limit."""


def http_client(
    headers: Mapping[str, str],
    *,
    transport: httpx2.AsyncBaseTransport,
    most_bytes: int,
    hide: Callable[[str], str],
    auth: httpx2.Auth | None,
    person_seconds: float = 0.0,
) -> httpx2.AsyncClient:
    """Return the client of one session; environment proxies and redirects to other origins are not used.

    Args:
        transport: sends the requests.
        hide: removes secrets from texts.
        most_bytes: of one answer, or of one event of a stream.
        person_seconds: how long a server may wait for a person during a request.
    """
    return httpx2.AsyncClient(
        transport=_Transport(transport, most_bytes, hide=hide, tells_denial=auth is None),
        # The limit counts what is received, and a few bytes can be decoded to any number.
        headers={**headers, "accept-encoding": _PLAIN},
        timeout=httpx2.Timeout(_CONNECT_SECONDS, read=_READ_SECONDS + person_seconds),
        auth=auth,
    )


class _Transport(httpx2.AsyncBaseTransport):
    """Bounds answers, and turns failed connections into JSON-RPC errors of their requests.

    An exception would end the session, and with it the calls of others.
    """

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        most_bytes: int,
        *,
        hide: Callable[[str], str],
        tells_denial: bool,
    ) -> None:
        self._inner = inner
        self._most_bytes, self._hide, self._tells_denial = most_bytes, hide, tells_denial
        #: When the last streams were opened, or may be.
        self._streams: deque[float] = deque(maxlen=_MOST_STREAMS)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            await self._pause()
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as exc:
            if request.method != "POST":
                raise
            text = self._hide(f"the server cannot be reached: {type(exc).__name__} {exc}".strip())
            return _error(request, text, data=NOT_SENT if isinstance(exc, _UNSENT) else None)
        if response.status_code in (401, 403) and self._tells_denial and request.method == "POST":
            await response.aclose()
            text = f"the server refused the request with status {response.status_code}; {_fix(response)}"
            return _error(request, text, data=NOT_SENT)
        coding = response.headers.get("content-encoding", _PLAIN).lower()
        if coding != _PLAIN:
            await response.aclose()
            return _error(
                request, f"its answer has the encoding {coding[:40]!r}, which was not asked for", data=None
            )
        is_stream = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)  # noqa: S101 - an asynchronous transport
        response.stream = _Bounded(stream, None if is_stream else self._most_bytes)
        return response

    async def _pause(self) -> None:
        now = at = time.monotonic()
        if len(self._streams) == _MOST_STREAMS:
            at = max(now, self._streams[0] + _MOST_STREAMS * FRESH_SECONDS)
        self._streams.append(at)
        await asyncio.sleep(at - now)

    async def aclose(self) -> None:
        await self._inner.aclose()


class OriginTransport(httpx2.AsyncBaseTransport):
    """Sends requests: to declared origins at any address, to all others at public ones only.

    With OAuth, answers of the server name further URLs: where the metadata of the resource is, which
    authorization servers there are, where tokens are. By them a server must not reach the worker's network.
    """

    def __init__(self, declared: Iterable[str], policy: AddressPolicy) -> None:
        """
        Args:
            declared: URLs whose origins may have any address.
            policy: which addresses others may have.
        """
        self._declared = frozenset(_origin(httpx2.URL(url)) for url in declared)
        self._policy = policy
        self._inner = httpx2.AsyncHTTPTransport()
        #: Without idle connections: an address may be that of several hosts.
        self._elsewhere: httpx2.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if _origin(request.url) in self._declared:
            return await self._inner.handle_async_request(request)
        host = request.url.raw_host.decode("ascii")
        try:
            addresses = await self._policy.resolve(host, request.url.port or 0)
        except DownloadError as exc:
            raise httpx2.ConnectError(
                f"{_shown(request.url)} is not declared: {exc}", request=request
            ) from exc
        if self._elsewhere is None:
            self._elsewhere = httpx2.AsyncHTTPTransport(limits=_NO_IDLE)
        for address in addresses[:-1]:
            try:
                return await self._elsewhere.handle_async_request(_at(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return await self._elsewhere.handle_async_request(_at(request, addresses[-1]))

    async def aclose(self) -> None:
        await self._inner.aclose()
        if self._elsewhere is not None:
            await self._elsewhere.aclose()


def _origin(url: httpx2.URL) -> tuple[str, bytes, int | None]:
    return url.scheme, url.raw_host, url.port


def _shown(url: httpx2.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _at(request: httpx2.Request, address: str) -> httpx2.Request:
    """Return the request for an address of its host; certificates are those of the host."""
    return httpx2.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.raw_host.decode("ascii")},
    )


def _fix(response: httpx2.Response) -> str:
    """Return what helps against a refusal."""
    if "bearer" not in response.headers.get("www-authenticate", "").lower():
        return "check its `headers`"
    return (
        "it wants OAuth: declare `nekro.oauth` with client credentials, or a token in `headers` "
        "(`Authorization: Bearer ${NAME}`); a login in a browser is not supported"
    )


class _Bounded(httpx2.AsyncByteStream):
    """Passes on a body of at most so many bytes, and pauses so that a flood leaves the loop to others."""

    def __init__(self, inner: httpx2.AsyncByteStream, most_bytes: int | None) -> None:
        self._inner, self._most_bytes = inner, most_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = burst = 0
        async for chunk in self._inner:
            total, burst = total + len(chunk), burst + len(chunk)
            if self._most_bytes is not None and total > self._most_bytes:
                raise _TooLargeError(
                    f"its answer has more than {self._most_bytes} bytes (NEKRO_MCP__MESSAGE_BYTES)"
                )
            if burst >= _BURST_BYTES:
                burst = 0
                await asyncio.sleep(DEFER_SECONDS)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


def _error(request: httpx2.Request, text: str, *, data: Any) -> httpx2.Response:
    error = {"code": INTERNAL_ERROR, "message": text, "data": data}
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error})
    return httpx2.Response(
        503, headers={"content-type": "application/json"}, content=body.encode(), request=request
    )


def auth_of(declared: OAuth | None, url: str, *, name: str) -> httpx2.Auth | None:
    """Return what authenticates the requests of a session; None without OAuth.

    The grant is ``client_credentials``, which needs no person.
    """
    if declared is None:
        return None
    return ClientCredentialsOAuthProvider(
        url,
        _InMemory(),
        resolve(declared.client_id, name=name),
        resolve(declared.client_secret, name=name),
        scope=declared.scope,
        issuer=resolve(declared.issuer, name=name),
    )


class _InMemory(TokenStorage):
    """Keeps tokens for one session: a new one costs a request and no person's time."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None
        self._client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._client = client_info
