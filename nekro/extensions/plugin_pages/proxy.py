"""Carries requests to the routes and pages of plugins: ``/plugins/<author.module>/…``."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Final

import httpx
from fastapi import APIRouter, Request, Response
from loguru import logger
from starlette.types import Message, Receive, Scope, Send

from broker_config.embedded import resolve_signing_key
from broker_config.settings import GatewaySettings, PluginAccess
from nekro.app.services import Services
from nekro.base.metrics import metrics
from nekro.base.tasks import end_tasks
from nekro.extensions.plugin_pages import webhooks
from nekro.extensions.plugin_pages.forwarding import (
    Sites,
    admit,
    is_reachable,
    not_served,
    request_headers,
    response_headers,
)
from nekro.gateway.dependencies import ServicesDep
from nekro.gateway.document.examples import JSON, Examples
from nekro.gateway.extensions import GatewayPart, Running, running
from nekro.gateway.outgoing import trusted_certificates
from nekro.operations.actor import Identity, RefusedError
from nekro.operations.actor import Scope as KeyScope
from nekro.wire.seals import CALLER_HEADER, PROOF_HEADER, SIGNATURE_HEADER, HttpSigner
from nekro_agent.execution.current import WebCaller
from nekro_agent.services.user.role import Role
from storage.catalogue import Site

__all__ = ["GATEWAY_PART", "PluginProxy"]

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
#: A worker that does not accept a connection in this time is gone, and the next one is asked.
_CONNECT_SECONDS: Final = 3.0
_IDLE_CONNECTIONS: Final = 32
#: Shorter than workers keep an idle connection, so that no request meets its end.
_KEEP_ALIVE_SECONDS: Final = 15.0
#: What servers log for a client that left before its answer began.
_CLIENT_LEFT: Final = 499


router = APIRouter(tags=["plugins"])


class _ClientLeft(Exception):
    """The client closed the connection."""


class PluginProxy(Running):
    """Sends requests to workers; one instance per gateway."""

    def __init__(self, services: Services) -> None:
        """Create the proxy; ``close`` it."""
        self.settings: GatewaySettings = services.settings.gateway
        self.sites = Sites(services.database)
        self.signer = HttpSigner(resolve_signing_key(services.settings).get_secret_value())
        #: Requests under way, by plugin.
        self.running: Counter[str] = Counter()
        seconds = self.settings.plugin_seconds
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=_IDLE_CONNECTIONS,
                keepalive_expiry=_KEEP_ALIVE_SECONDS,
            ),
            follow_redirects=False,
            trust_env=False,
            verify=trusted_certificates(),
        )

    async def close(self) -> None:
        """Close the connections to workers."""
        await self.client.aclose()


@router.api_route("/plugins/{plugin_key}", methods=list(_METHODS), include_in_schema=False)
@router.api_route("/plugins/{plugin_key}/{path:path}", methods=list(_METHODS), include_in_schema=False)
async def ask_plugin(plugin_key: str, request: Request, services: ServicesDep) -> Response:
    """Let the plugin answer."""
    await services.refresh()
    settings = services.settings.gateway
    plugin = next((one for one in services.registry.plugins if one.key == plugin_key), None)
    if plugin is None or not plugin.serves_http or not is_reachable(settings, plugin):
        raise not_served(request.url.path)
    access = settings.access_to(plugin_key)
    identity = await admit(request, access)
    return _PluginAnswer(running(request, PluginProxy), plugin_key, access, identity)


class _PluginAnswer(Response):
    """The answer of a plugin: asked for and passed on when the server sends it."""

    def __init__(
        self, proxy: PluginProxy, plugin_key: str, access: PluginAccess, identity: Identity | None
    ) -> None:
        super().__init__()
        self._proxy, self._plugin_key, self._access = proxy, plugin_key, access
        self._caller = None if identity is None else _caller(identity)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, began = _CLIENT_LEFT, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            status = int(message.get("status", status))
            await send(message)

        try:
            await self._limited(scope, receive, watched)
        except RefusedError as exc:
            status = exc.status
            raise
        finally:
            kind = "left" if status == _CLIENT_LEFT else f"{status // 100}xx"
            metrics().plugin_http_requests.labels(self._plugin_key, kind).inc()
            metrics().plugin_http_seconds.labels(self._plugin_key).observe(time.perf_counter() - began)

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        proxy, key = self._proxy, self._plugin_key
        if proxy.running[key] >= proxy.settings.plugin_requests:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "plugin_busy",
                f"{proxy.running[key]} requests to {key} are under way; try again later",
                headers={"Retry-After": "1"},
            )
        proxy.running[key] += 1
        try:
            await self._answer(scope, _Incoming(scope, receive), send)
        finally:
            proxy.running[key] -= 1
            proxy.running += Counter()  # forgets plugins without requests

    async def _answer(self, scope: Scope, incoming: _Incoming, send: Send) -> None:
        """Pass on the answer until it ends, a limit is reached or the client leaves."""
        has_begun = False

        async def begin(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        work = asyncio.create_task(self._carry(scope, incoming, begin))
        left = asyncio.create_task(incoming.left())
        try:
            limit = self._proxy.settings.plugin_stream_seconds
            await asyncio.wait((work, left), timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        except _ClientLeft:
            pass
        finally:
            await end_tasks(work, left)
        if not has_begun:  # the client has left; only the middlewares see this answer
            await Response(status_code=_CLIENT_LEFT)(scope, incoming.receive, send)

    async def _carry(self, scope: Scope, incoming: _Incoming, send: Send) -> None:
        try:
            answer = await self._ask(scope, incoming)
        except httpx.TimeoutException:
            raise RefusedError(
                HTTPStatus.GATEWAY_TIMEOUT,
                "plugin_timeout",
                f"{self._plugin_key} did not answer within {self._proxy.settings.plugin_seconds:g} s",
            ) from None
        except httpx.HTTPError as exc:
            logger.bind(plugin=self._plugin_key, error=repr(exc)).warning("plugin_request_failed")
            raise RefusedError(
                HTTPStatus.BAD_GATEWAY, "plugin_failed", f"{self._plugin_key} closed the connection"
            ) from None
        try:
            await self._pass_on(answer, send)
        finally:
            await answer.aclose()

    async def _pass_on(self, answer: httpx.Response, send: Send) -> None:
        headers = response_headers(answer.headers, self._access)
        await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
        try:
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except httpx.HTTPError as exc:
            # Without a last part the server cuts the connection, so the client sees that parts are missing.
            logger.bind(plugin=self._plugin_key, error=repr(exc)).warning("plugin_answer_cut")
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ask(self, scope: Scope, incoming: _Incoming) -> httpx.Response:
        """Return the answer of the first worker that accepts the connection."""
        sites = await self._proxy.sites.of(self._plugin_key)
        for number, site in enumerate(sites, start=1):
            try:
                return await self._ask_site(site, scope, incoming)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self._proxy.sites.forget(self._plugin_key)
                if number == len(sites):
                    raise
        raise AssertionError  # there is at least one

    async def _ask_site(self, site: Site, scope: Scope, incoming: _Incoming) -> httpx.Response:
        proxy, key = self._proxy, self._plugin_key
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        signature, proof = proxy.signer.sign(
            method=scope["method"], target=target.decode("latin-1"), plugin_key=key
        )
        headers = request_headers(scope, self._access, prefix=f"/plugins/{key}")
        headers.append((SIGNATURE_HEADER.encode(), signature.encode()))
        if self._caller is not None:
            vouched = proxy.signer.vouch(self._caller.to_text(), signature=signature)
            headers.append((CALLER_HEADER.encode(), vouched.encode()))
        host, _, port = site.address.rpartition(":")
        url = httpx.URL(scheme="http", host=host, port=int(port), raw_path=target)
        content = incoming.parts() if incoming.has_body else None
        request = httpx.Request(scope["method"], url, headers=headers, content=content)
        answer = await proxy.client.send(request, stream=True)
        incoming.is_answered()
        if answer.headers.get(PROOF_HEADER) != proof:
            await answer.aclose()
            proxy.sites.forget(key)
            raise httpx.RemoteProtocolError("the answer is not from a worker of this fleet")
        return answer


def _caller(identity: Identity) -> WebCaller:
    role = Role.Super if KeyScope.ADMIN in identity.scopes else Role.User
    return WebCaller(
        name=identity.user_id or identity.name,
        user_id=identity.user_id,
        level=role,
        account_id=identity.account_id,
    )


class _Incoming:
    """What a client sends: the body's parts, and the news that it left."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name for name, _ in scope["headers"]}
        self.has_body = b"transfer-encoding" in names or b"content-length" in names
        self.receive = receive
        self._is_read = asyncio.Event()
        if not self.has_body:
            self._is_read.set()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            more = message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
        self._is_read.set()

    def is_answered(self) -> None:
        """End the reading of the body; the plugin may have answered before it was complete."""
        self._is_read.set()

    async def left(self) -> None:
        """Return when the client has left after its body, or after the answer has begun."""
        await self._is_read.wait()
        while (await self.receive())["type"] != "http.disconnect":
            pass


_EXAMPLES: Final = Examples(
    parameters={
        "endpoint": "orders",
    },
    models={
        "WebhookAnswer": {
            "success": True,
            "message": "1 webhooks returned, 0 failed",
            "data": {"results": [{"plugin_key": "Ada.shop", "result": "thanks"}], "errors": []},
        },
    },
    operations={
        "receive_webhook": {"body": {JSON: {"order": 42, "state": "paid"}}},
    },
)

GATEWAY_PART: Final = GatewayPart(
    root=(webhooks.router, router),
    limits=(
        (re.compile("/plugins/.*"), lambda settings: settings.plugin_body_bytes),
        (re.compile("/api/webhook/.*"), lambda settings: settings.webhook_body_bytes),
    ),
    passed_on=("/plugins/",),
    build=lambda services, _hub: PluginProxy(services),
    examples=_EXAMPLES,
)
