"""`/mcp`: MCP over streamable HTTP, on any number of gateways; nothing is kept between two requests."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from fastapi import APIRouter, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from broker_config.embedded import resolve_signing_key
from broker_config.settings import GatewaySettings
from nekro.app.services import Services
from nekro.extensions.mcp.server.callers import Caller, Sessions, caller_of
from nekro.gateway.dependencies import identity_of
from nekro.gateway.extensions import Running, running
from nekro.gateway.problems import problem_of
from nekro.gateway.streams.hub import EventHub
from nekro.gateway.web.responses import SEND_SECONDS, JsonAnswer
from nekro.operations.actor import Identity, RefusedError
from nekro_agent.errors import NekroError
from nekro_client.models import Problem

if TYPE_CHECKING:
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from nekro.extensions.mcp.server.server import FleetMcpServer

__all__ = ["McpEndpoint", "router"]

router = APIRouter()
_SESSION: Final = "mcp-session-id"
#: Code of an error in JSON-RPC whose request was not read.
_INVALID_REQUEST: Final = -32600


@router.api_route("/mcp", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def mcp(request: Request) -> Response:
    """Serve one message of a client."""
    endpoint = running(request, McpEndpoint)
    try:
        return await endpoint.answer(request, await identity_of(request))
    except (RefusedError, NekroError) as exc:
        return _refusal(problem_of(request, exc), getattr(exc, "headers", {}))


def _refusal(problem: Problem, headers: dict[str, str]) -> Response:
    """Return a problem as an error of the protocol, whose text clients show."""
    message = f"{problem.code}: {problem.detail}"
    error = {"code": _INVALID_REQUEST, "message": message, "data": problem.model_dump(mode="json")}
    body = {"jsonrpc": "2.0", "id": None, "error": error}
    return JsonAnswer(body, status_code=problem.status, headers=headers)


class McpEndpoint(Running):
    """The endpoint of one gateway; the SDK is imported at the first request."""

    def __init__(self, services: Services, hub: EventHub) -> None:
        self._services, self._hub = services, hub
        self._settings = services.settings.gateway
        self._sessions = Sessions(resolve_signing_key(services.settings).get_secret_value())
        self._server: FleetMcpServer | None = None
        self._manager: StreamableHTTPSessionManager | None = None
        self._running: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._closing = asyncio.Event()

    def end(self) -> None:
        """End the streams of listening clients."""
        if self._server is not None:
            self._server.changes.close()

    async def close(self) -> None:
        """Cancel what still runs."""
        self.end()
        self._closing.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    async def answer(self, request: Request, identity: Identity) -> Response:
        """Return the answer to a request.

        Raises:
            RefusedError: 403, its origin; 404, its session or chat; 405, it is no POST; 501, there is no SDK.
        """
        _refuse_origin(request, self._settings)
        if request.method != "POST":
            # Nothing is kept between requests: there is no stream to open and no session to delete.
            detail = "send messages with POST; `subscriptions/listen` opens a stream of changes"
            raise RefusedError(
                HTTPStatus.METHOD_NOT_ALLOWED, "method_not_allowed", detail, headers={"Allow": "POST"}
            )
        session = request.headers.get(_SESSION)
        if session is not None and not self._sessions.is_valid(session, identity):
            raise RefusedError(HTTPStatus.NOT_FOUND, "not_found", "there is no such session; begin a new one")
        request.state.mcp_caller = caller_of(self._services, request, identity)
        manager = await self._started()
        body = await request.body()
        begun = self._sessions.new(identity) if session is None and _begins_session(body) else None
        return _Answer(manager, body, session=begun)

    async def _started(self) -> StreamableHTTPSessionManager:
        async with self._starting:
            if self._manager is None:
                await self._start()
            assert self._manager is not None  # noqa: S101 - ``_start`` sets it
            return self._manager

    async def _start(self) -> None:
        try:
            from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

            from nekro.extensions.mcp.server.calls import run_on_workers
            from nekro.extensions.mcp.server.server import FleetMcpServer
        except ImportError as exc:
            detail = "this gateway has no MCP SDK; install it with `pip install 'nekro-workers[mcp]'`"
            raise RefusedError(HTTPStatus.NOT_IMPLEMENTED, "mcp_missing", detail) from exc
        self._server = FleetMcpServer(self._services, self._hub, _caller_of_context, run=run_on_workers)
        manager = StreamableHTTPSessionManager(
            self._server.sdk, stateless=True, max_request_body_size=self._settings.body_bytes
        )
        ready = asyncio.Event()

        async def run() -> None:
            async with manager.run():
                ready.set()
                await self._closing.wait()

        self._running = asyncio.create_task(run(), name="nekro-mcp")
        await ready.wait()
        self._manager = manager


class _Answer(Response):
    """Lets the SDK answer a request whose body was read."""

    def __init__(self, manager: StreamableHTTPSessionManager, body: bytes, *, session: str | None) -> None:
        self._manager, self._body, self._session = manager, body, session
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request; one that does not read its answer ends."""
        is_read = False

        async def replay() -> Message:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def bounded(message: Message) -> None:
            if message["type"] == "http.response.start" and self._session is not None:
                MutableHeaders(scope=message)[_SESSION] = self._session
            async with asyncio.timeout(SEND_SECONDS):  # then the reader is too slow
                await send(message)

        await self._manager.handle_request(scope, replay, bounded)


def _caller_of_context(ctx: Any) -> Caller:
    caller: Caller = ctx.request.state.mcp_caller
    return caller


def _begins_session(body: bytes) -> bool:
    if b'"initialize"' not in body:
        return False
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(message, dict) and message.get("method") == "initialize"


def _refuse_origin(request: Request, settings: GatewaySettings) -> None:
    """Refuse a web site of another origin, also one that has a key, unless CORS is opened for it."""
    origin = request.headers.get("origin")
    if origin is None or origin in settings.cors_origins or "*" in settings.cors_origins:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        detail = "a web site of another origin may not use MCP here; NEKRO_GATEWAY__CORS_ORIGINS permits it"
        raise RefusedError(HTTPStatus.FORBIDDEN, "cross_site", detail)
