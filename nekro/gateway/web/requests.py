"""What every request passes before its route: id, trace, log and metrics; Host; cross-site requests.

These are plain ASGI middlewares: answers are streamed through them, and context variables set here are
visible in the route.

Stream tickets are taken out of URLs before anything can log them. Servers decode a path before it is routed,
so the ``%2F`` of a chat key would end a segment. Here each segment is decoded by itself, and a slash inside a
segment is replaced by a noncharacter until the route has it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, unquote_to_bytes, urlencode

from fastapi import Request
from loguru import logger
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker_config.settings import GatewaySettings
from nekro.app.http_server import AllowedHosts, has_ambiguous_length, is_loopback
from nekro.base.metrics import metrics
from nekro.broker.tracing import span, trace_headers
from nekro.gateway.problems import problem_response
from nekro.gateway.web.responses import EVENT_STREAM, SEND_SECONDS
from nekro.wire.invocation import new_id

__all__ = [
    "ANSWER_HEADERS",
    "HostCheck",
    "RequestContext",
    "UrlTicket",
    "decoded",
    "restored",
    "take_ticket",
]


#: A Unicode noncharacter, which no text for interchange contains.
_SLASH: Final = "\ufdef"


def decoded(raw_path: bytes) -> str | None:
    """Return the path to route; None if it is not UTF-8, or contains the replacement of a slash."""
    segments = []
    for raw in raw_path.partition(b"?")[0].split(b"/"):
        try:
            segment = unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            return None
        if _SLASH in segment:
            return None
        segments.append(segment.replace("/", _SLASH))
    return "/".join(segments)


def restored(segment: str) -> str:
    """Return a segment with its slashes."""
    return segment.replace(_SLASH, "/")


#: The only requests with tickets.
_STREAM: Final = re.compile(rb"/api/v1/(?:chats/([^/?]+)/events|changes)(?:\?.*)?")


class UrlTicket(NamedTuple):
    """A ticket as a URL had it, and the chat of the URL."""

    #: "" for the stream of changes; no chat has this key.
    chat_key: str
    #: "" if the URL had several.
    text: str


def take_ticket(scope: Scope) -> UrlTicket | None:
    """Remove the ticket from the URL of a request for a stream, and return it.

    None: it is a request for something else, or has no ticket.
    """
    match = _STREAM.fullmatch(scope.get("raw_path") or b"")
    if match is None or b"ticket=" not in scope["query_string"]:
        return None
    fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    texts = [value for name, value in fields if name == "ticket"]
    if not texts:
        return None
    rest = [field for field in fields if field[0] != "ticket"]
    scope["query_string"] = urlencode(rest, errors="surrogateescape").encode("ascii")
    # Several could mean different tickets to different readers of the URL.
    return UrlTicket(unquote((match[1] or b"").decode("latin-1")), texts[0] if len(texts) == 1 else "")


_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
#: Source: W3C Trace Context, section 3.2.
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Paths that a load balancer asks by address.
_PROBES: Final = ("/healthz", "/readyz")
#: Most bytes of the URL and the headers together.
_HEAD_BYTES: Final = 32 << 10
#: Files that pages of any site may show: who has the link may read.
_LINKS: Final = "/links/"
#: The coding of a body that is not encoded (RFC 9110, section 12.5.3).
_PLAIN: Final = "identity"

_AMBIGUOUS: Final = (
    HTTPStatus.BAD_REQUEST,
    "length_ambiguous",
    "send Content-Length, or with HTTP/1.1 Transfer-Encoding instead of it",
)

_FULL: Final = (
    HTTPStatus.SERVICE_UNAVAILABLE,
    "overloaded",
    "too many connections to this gateway; send the request again",
)

_INTERNAL: Final = (
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "internal",
    "internal error; the gateway's log has it under the request's id",
)

_STOPPING: Final = (
    HTTPStatus.SERVICE_UNAVAILABLE,
    "stopping",
    "the gateway is stopping, and the request was not done in time; send it again, with the same"
    " Idempotency-Key if it had one: it may have had its effect",
)

_AGAIN: Final = {"Retry-After": "1", "Connection": "close"}

_SAFE_SITES: Final = ("same-origin", "none")
#: Of every answer, but those that set their own headers.
ANSWER_HEADERS: Final = {
    # Of sessions: a cache in front of the gateway does not know that their cookie gives the rights.
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
}


class RequestContext:
    """Gives each request an id, and records it; an unexpected error becomes a problem document.

    ``request.state.held`` is closed when the request has ended, in any way.
    """

    def __init__(self, app: ASGIApp, *, own_headers: Iterable[str] = ()) -> None:
        """Record requests.

        Args:
            own_headers: prefixes of paths whose answers set their own headers.
        """
        self._app, self._own_headers = app, tuple(own_headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = _headers(scope)
        request_id = _request_id(headers)
        held = ExitStack()
        scope.setdefault("state", {}).update(request_id=request_id, held=held, ticket=take_ticket(scope))
        defaults = {} if scope["path"].startswith(self._own_headers) else ANSWER_HEADERS
        answer = _Recorded(send, request_id, defaults=defaults, abort=scope["state"].get("abort"))
        started = time.perf_counter()
        metrics().http_in_flight.inc()
        try:
            with (
                logger.contextualize(request_id=request_id),
                span("http.request", {"request_id": request_id}, kind="server", headers=headers) as part,
                logger.contextualize(**_trace(headers)),
            ):
                await self._serve(scope, receive, answer)
                route, method = _route(scope), _method(scope)
                part.set_attributes(route=route, method=method, status=answer.status)
                self._record(scope, answer, route, method, started)
        finally:
            held.close()
            metrics().http_in_flight.dec()

    async def _serve(self, scope: Scope, receive: Receive, answer: _Recorded) -> None:
        try:
            await self._app(scope, receive, answer)
        except (
            Exception,
            asyncio.CancelledError,
        ) as exc:  # the edge: the log has the cause, the client its id
            if not _is_cut(exc):
                logger.opt(exception=exc).error("request_failed")
                problem = problem_response(Request(scope), *_INTERNAL)
            elif scope["app"].state.stopping.is_set():
                logger.warning("request_cut")
                problem = problem_response(Request(scope), *_STOPPING, headers=_AGAIN)
            else:
                raise
            if not answer.status:
                await problem(scope, receive, answer)
            # Else the answer has begun; the server closes the connection, since it has no end.

    def _record(self, scope: Scope, answer: _Recorded, route: str, method: str, started: float) -> None:
        ended = time.perf_counter()
        metrics().http_requests.labels(route, method, str(answer.status)).inc()
        # A stream lasts as long as its client wants.
        until = ended if answer.stream_began is None else answer.stream_began
        metrics().http_seconds.labels(route).observe(until - started)
        identity = scope["state"].get("identity")
        logger.bind(
            method=method,
            route=route,
            status=answer.status,
            duration_ms=round((ended - started) * 1000, 1),
            key_id=None if identity is None else identity.key_id,
        ).log("DEBUG" if route in _PROBES else "INFO", "request")


class _Recorded:
    """Sends an answer with the headers of every answer, and keeps its status; 0 before it begins.

    A client that takes nothing for ``SEND_SECONDS`` is disconnected.
    """

    def __init__(
        self,
        send: Send,
        request_id: str,
        *,
        defaults: Mapping[str, str],
        abort: Callable[[], None] | None,
    ) -> None:
        """``abort`` drops the connection; None: the server bounds the time of its writes."""
        self._send, self._request_id, self._defaults, self._abort = send, request_id, defaults, abort
        self.status = 0
        #: When a stream of events began, by ``time.perf_counter``; None for other answers.
        self.stream_began: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            headers = MutableHeaders(scope=message)
            if headers.get("content-type", "").startswith(EVENT_STREAM):
                self.stream_began = time.perf_counter()
            headers["x-request-id"] = self._request_id
            for name, value in self._defaults.items():
                headers.setdefault(name, value)
        if self._abort is None:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError:
            self._abort()
            await asyncio.sleep(0)  # so that the server learns that the client has left


class HostCheck:
    """Refuses requests for other hosts, and requests that a foreign web site makes through a browser."""

    def __init__(self, app: ASGIApp, *, settings: GatewaySettings, passed_on: Iterable[str] = ()) -> None:
        """Check requests.

        Args:
            passed_on: prefixes of paths whose bodies are passed on encoded.
        """
        self._app, self._passed_on = app, tuple(passed_on)
        is_local = settings.socket is None and is_loopback(settings.host)
        own = (settings.host,) if is_local else ()
        #: None admits all: elsewhere than on loopback a key is needed, which no browser adds by itself.
        self._hosts = (
            AllowedHosts((*own, *settings.allowed_hosts)) if is_local or settings.allowed_hosts else None
        )
        self._origins = frozenset(settings.cors_origins) - {"*"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that is for this gateway."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http":
            if scope["state"].get("is_full", bool)():
                await problem_response(Request(scope), *_FULL, headers=_AGAIN)(scope, receive, send)
                return
            if has_ambiguous_length(scope):
                # A proxy before us may see another end of the body, and take what follows for a request.
                problem = problem_response(Request(scope), *_AMBIGUOUS, headers={"Connection": "close"})
                await problem(scope, receive, send)
                return
            fault = self._fault(scope)
            if fault is not None:
                await problem_response(Request(scope), *fault)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> tuple[HTTPStatus, str, str] | None:
        if _size(scope) > _HEAD_BYTES:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            return status, "headers_too_large", f"URL and headers have more than {_HEAD_BYTES} bytes"
        path = decoded(scope.get("raw_path") or scope["path"].encode())
        if path is None:
            return HTTPStatus.BAD_REQUEST, "path_invalid", "the path is not UTF-8"
        scope["path"] = path
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if self._hosts is not None and path not in _PROBES and not self._hosts.admits(hosts):
            detail = "the Host header names none of NEKRO_GATEWAY__ALLOWED_HOSTS"
            return HTTPStatus.MISDIRECTED_REQUEST, "host_not_allowed", detail
        headers = _headers(scope)
        is_encoded = headers.get("content-encoding", _PLAIN).strip().lower() != _PLAIN
        if is_encoded and not path.startswith(self._passed_on):
            # Decoding would let a small body become a large one; storing it undecoded would alter it.
            detail = "the gateway decodes no bodies; send this one without Content-Encoding"
            return HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "content_encoding_unsupported", detail
        if path.startswith(_LINKS):
            return None
        has_secret = "authorization" in headers or scope["state"]["ticket"] is not None
        if not has_secret and self._is_cross_site(scope["method"], headers):
            detail = "a web site of another origin may not use this gateway without a key"
            return HTTPStatus.FORBIDDEN, "cross_site", detail
        return None

    def _is_cross_site(self, method: str, headers: Mapping[str, str]) -> bool:
        origin = headers.get("origin")
        if origin in self._origins or method == "OPTIONS":
            return False
        site = headers.get("sec-fetch-site")
        if site is not None and site not in _SAFE_SITES:
            # A link to a page may be followed; what it answers stays with this origin.
            return not (method == "GET" and headers.get("sec-fetch-mode") == "navigate")
        return origin is not None and origin.partition("://")[2] != headers.get("host")


def _is_cut(error: BaseException) -> bool:
    """Whether the server cancelled the request; a route may raise the same error for a task of its own."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _size(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope.get("raw_path") or b"") + len(scope["query_string"])


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else new_id()


def _trace(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace id for the log; while tracing is off, the one that the client states."""
    stated = _TRACEPARENT.fullmatch(trace_headers().get("traceparent") or headers.get("traceparent", ""))
    return {} if stated is None else {"trace_id": stated[1]}


def _route(scope: Scope) -> str:
    """Return the route's pattern; the number of patterns is that of the routes.

    A route has the pattern of its own router only; the segments before it are those of routers around it.
    """
    pattern = str(getattr(scope.get("route"), "path", ""))
    if not pattern:
        return "unmatched"
    if ":path}" in pattern:
        return pattern
    before = scope["path"].split("/")[: -pattern.count("/")]
    return "/".join(before) + pattern


def _method(scope: Scope) -> str:
    method = str(scope["method"])
    return method if method in _METHODS else "OTHER"
