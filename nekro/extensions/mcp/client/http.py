"""The HTTP client of sessions: headers, OAuth, bounds on answers, and errors that end one request only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx2
from mcp.client.auth import TokenStorage
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.streamable_http import MCP_SESSION_ID
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from mcp_types import INTERNAL_ERROR

from nekro.extensions.mcp.client.bodies import AnswerStream, Bounded, Events, Fate, error_of
from nekro.extensions.mcp.client.faults import refusal_of
from nekro.extensions.mcp.client.messages import request_id_of
from nekro.extensions.mcp.declarations import OAuth, resolve
from nekro_agent.downloads.addresses import AddressPolicy
from nekro_agent.durations import CLOSE_STEP_SECONDS, FRESH_SECONDS
from nekro_agent.errors import DownloadError

__all__ = ["OriginTransport", "auth_of", "certificates", "http_client"]

#: The coding of a body that is not encoded (RFC 9110, section 12.5.3).
_PLAIN: Final = "identity"
#: Longest time for connecting.
_CONNECT_SECONDS: Final = 10.0
#: Longest time without a byte of an answer.
_READ_SECONDS: Final = 300.0
#: Streams of events that a session opens without a pause. Servers end them and choose the pause, so after
#: these it is ``FRESH_SECONDS`` for each stream.
_MOST_STREAMS: Final = 10
_EVENTS: Final = "text/event-stream"
_OF_BODY: Final = ("content-length", "transfer-encoding")
_REDIRECTS: Final = (301, 302, 303, 307, 308)
#: Of the body of a refusal.
_MOST_REFUSAL_BYTES: Final = 64 << 10
#: Requests that were given up, whose late answers belong to no other request.
_MOST_GIVEN_UP: Final = 1_000
_NO_IDLE: Final = httpx2.Limits(max_keepalive_connections=0)
_UNSENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


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
    """Bounds answers, interprets them, and turns failures into errors of their requests.

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
        #: Requests without an answer: those that wait, and the last ones that were given up.
        self._open: set[int | str] = set()
        self._given_up: deque[int | str] = deque(maxlen=_MOST_GIVEN_UP)
        self._is_session_lost = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "DELETE" and MCP_SESSION_ID in request.headers:
            return await self._end_session(request)
        asked = await _asked(request)
        if request.method == "GET":
            await self._pause()
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as exc:
            if request.method != "POST":
                raise
            text = self._hide(f"the server cannot be reached: {type(exc).__name__} {exc}".strip())
            return _error(request, text, data=Fate.NOT_SENT if isinstance(exc, _UNSENT) else Fate.UNKNOWN)
        return await self._read(request, asked, response)

    async def _read(
        self, request: httpx2.Request, asked: _Asked | None, response: httpx2.Response
    ) -> httpx2.Response:
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)  # noqa: S101 - an asynchronous transport
        coding = response.headers.get("content-encoding", _PLAIN).lower()
        if coding != _PLAIN:
            await response.aclose()
            text = f"its answer has the encoding {coding[:40]!r}, which was not asked for"
            return _error(request, text, data=None)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if asked is None or response.status_code in _REDIRECTS:
            is_stream = kind == _EVENTS
            is_of_session = is_stream and request.method == "GET" and response.status_code == 200
            response.stream = (
                Events(stream, self._most_bytes)
                if is_of_session
                else Bounded(stream, None if is_stream else self._most_bytes)
            )
            return response
        if response.status_code >= 400:
            return await self._refused(request, asked, response)
        if asked.id is None:
            # Servers answer notifications with any status and body; none of them says anything.
            await response.aclose()
            return httpx2.Response(202, request=request)
        return self._answered(request, asked.id, response, stream, kind)

    def _answered(
        self,
        request: httpx2.Request,
        request_id: int | str,
        response: httpx2.Response,
        stream: httpx2.AsyncByteStream,
        kind: str,
    ) -> httpx2.Response:
        key = request_id_of(request_id)
        assert key is not None  # noqa: S101 - the SDK's ids are numbers
        self._open.add(key)

        def end(is_complete: bool) -> None:
            if key in self._open and not is_complete:
                self._given_up.append(key)
            self._open.discard(key)

        answer = AnswerStream(
            stream,
            request_id=request_id,
            kind=kind,
            most_bytes=self._most_bytes,
            is_of_another=lambda other: other != key and (other in self._open or other in self._given_up),
            on_end=end,
        )
        headers = {"content-type": _EVENTS}
        if (session := response.headers.get(MCP_SESSION_ID)) is not None:
            headers[MCP_SESSION_ID] = session
        return httpx2.Response(
            200, headers=headers, stream=answer, request=request, extensions=response.extensions
        )

    async def _refused(
        self, request: httpx2.Request, asked: _Asked, response: httpx2.Response
    ) -> httpx2.Response:
        status = response.status_code
        body = await _beginning(response)
        refusal = refusal_of(status, body, method=asked.method, has_session=MCP_SESSION_ID in request.headers)
        if refusal.data is None and status in (401, 403) and not self._tells_denial:
            # The SDK's OAuth reads it.
            headers = [(key, value) for key, value in response.headers.items() if key not in _OF_BODY]
            return httpx2.Response(status, headers=headers, content=body, request=request)
        if refusal.data is None and status in (401, 403):
            text = f"the server refused the request with status {status}; {_fix(response)}"
            return _error(request, text, data=Fate.DENIED)
        self._is_session_lost |= refusal.data == Fate.NO_SESSION
        return _error(request, self._hide(refusal.text), data=refusal.data, code=refusal.code)

    async def _end_session(self, request: httpx2.Request) -> httpx2.Response:
        """End the session at the server; one that is lost, or that does not answer, is left to itself."""
        if not self._is_session_lost:
            with contextlib.suppress(httpx2.TransportError, TimeoutError):
                async with asyncio.timeout(CLOSE_STEP_SECONDS):
                    response = await self._inner.handle_async_request(request)
                    await response.aclose()
        return httpx2.Response(204, request=request)

    async def _pause(self) -> None:
        now = at = time.monotonic()
        if len(self._streams) == _MOST_STREAMS:
            at = max(now, self._streams[0] + _MOST_STREAMS * FRESH_SECONDS)
        self._streams.append(at)
        await asyncio.sleep(at - now)

    async def aclose(self) -> None:
        await self._inner.aclose()


@functools.cache
def certificates() -> ssl.SSLContext:
    """Return the context of all connections; reading the certificates takes a tenth of a second."""
    return httpx2.create_ssl_context()


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
        self._inner = httpx2.AsyncHTTPTransport(verify=certificates())
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
            self._elsewhere = httpx2.AsyncHTTPTransport(verify=certificates(), limits=_NO_IDLE)
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


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a POST sends: a request, or a notification or an answer without an id."""

    method: str
    id: int | str | None


async def _asked(request: httpx2.Request) -> _Asked | None:
    """Return the message of a request; None if it is none of the protocol, such as one for a token."""
    if request.method != "POST" or not request.headers.get("content-type", "").startswith("application/json"):
        return None
    try:
        message = json.loads(await request.aread())
    except ValueError:
        return None
    if not isinstance(message, dict) or "jsonrpc" not in message:
        return None
    method = str(message.get("method") or "")
    return _Asked(method=method, id=message.get("id") if method else None)


async def _beginning(response: httpx2.Response) -> bytes:
    """Read the beginning of a body, and close the answer."""
    body = bytearray()
    stream = response.stream
    assert isinstance(stream, httpx2.AsyncByteStream)  # noqa: S101 - an asynchronous transport
    with contextlib.suppress(httpx2.TransportError, TimeoutError):
        async with asyncio.timeout(CLOSE_STEP_SECONDS):
            async for chunk in stream:
                body += chunk
                if len(body) >= _MOST_REFUSAL_BYTES:
                    break
    await response.aclose()
    return bytes(body[:_MOST_REFUSAL_BYTES])


def _error(request: httpx2.Request, text: str, *, data: Any, code: int = INTERNAL_ERROR) -> httpx2.Response:
    body = json.dumps(error_of(None, text, data, code=code))
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
