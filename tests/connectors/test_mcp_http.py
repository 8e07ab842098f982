"""Servers with a URL: sessions that are shared, renewed and bounded; headers and OAuth."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp_world import opened
from odd_server import handle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import WAIT_SECONDS, eventually, wait_until

from broker_config.settings import DownloadSettings, McpSettings, Settings
from nekro.extensions.mcp.client.faults import ServerFault
from nekro.extensions.mcp.client.tools import MOST_TOOLS
from nekro_agent.errors import MethodFailedError, OutcomeUnknownError


@contextmanager
def served(app: Any, port: int = 0) -> Iterator[str]:
    """Serve an ASGI application on a free port in a thread; yields its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", lifespan="on")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, what="the server")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join()


class Odd:
    """The odd server over HTTP; ``sessions`` are those that it knows."""

    def __init__(self, mode: str = "") -> None:
        self.mode = mode
        self.sessions: set[str] = set()
        self.opened = 0
        #: What answers an unknown session.
        self.lost = Response(status_code=404)
        self.headers: list[dict[str, str]] = []
        self.streams = 0
        self.methods: list[str | None] = []

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/mcp", self.answer, methods=["GET", "POST", "DELETE"])])

    async def answer(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        if self.mode == "denied":
            return Response(status_code=401)
        if request.method == "GET" and self.mode == "restless":
            self.streams += 1
            return Response("retry: 0\nid: 1\ndata:\n\n", media_type="text/event-stream")
        if request.method != "POST":
            return Response(status_code=405)
        message = await request.json()
        self.methods.append(message.get("method"))
        headers = {}
        if message.get("method") == "initialize":
            self.opened += 1
            headers["mcp-session-id"] = f"s{self.opened}"
            self.sessions.add(headers["mcp-session-id"])
        elif request.headers.get("mcp-session-id") not in self.sessions:
            return self.lost
        if message.get("method") == "tools/call" and self.mode in ("hang", "cut", "endless"):
            return self.broken()
        if message.get("method") == "tools/call" and self.mode == "packed":
            packed = gzip.compress(b" " * (50 << 20))
            return Response(packed, media_type="application/json", headers={"content-encoding": "gzip"})
        found = await asyncio.to_thread(handle, message, self.mode, lambda *_: None)
        return Response(status_code=202) if found is None else JSONResponse(found, headers=headers)

    def broken(self) -> Response:
        async def body() -> AsyncIterator[bytes]:
            if self.mode == "cut":
                yield b'{"jsonrpc": "2.0", '
                raise RuntimeError("the connection breaks here")
            while True:
                yield b"event: message\ndata: " + b"x" * 65_536
                await asyncio.sleep(3600 if self.mode == "hang" else 0)

        kind = "application/json" if self.mode == "cut" else "text/event-stream"
        return StreamingResponse(body(), media_type=kind)


def entry(address: str, **own: Any) -> dict[str, Any]:
    return {"url": f"{address}/mcp", "headers": {"X-Key": "${MCP_TEST_KEY:-none}"}, "nekro": own}


def sdk_server() -> MCPServer:
    """A server made with the SDK, which speaks the newest version of the protocol."""
    server = MCPServer("with-sdk", version="7")

    @server.tool(structured_output=True)
    def add(a: int, b: int = 2) -> dict[str, int]:
        """Add two numbers."""
        return {"sum": a + b}

    @server.tool()
    async def slow(ctx: Context) -> str:
        """Report progress."""
        await ctx.report_progress(1, 2, "half")
        return "done"

    return server


async def test_a_server_of_the_sdk_is_used_in_the_newest_version(settings: Settings) -> None:
    with served(sdk_server().streamable_http_app()) as address:
        async with opened(settings, entry(address)) as world:
            listing, _ = await world.hub.listing(world.server)
            assert listing.session.about["protocol"] == "2026-07-28"
            assert listing.confinement is None and not world.plugin.pinned
            assert await world.call("add", 1) == {"sum": 3}
            assert await world.call("add", 1, b=5) == {"sum": 6}
            assert await world.call("slow") == {"result": "done"}
            assert world.progress == [(50.0, "half")]
            many = await asyncio.gather(*(world.call("add", n) for n in range(20)))
            assert [one["sum"] for one in many] == [n + 2 for n in range(20)]


async def test_a_server_of_the_sdk_that_was_restarted_gets_a_new_session(settings: Settings) -> None:
    """It speaks a version with sessions, because it does not know the newest one."""

    def older() -> Any:
        app = sdk_server().streamable_http_app()

        async def without_discovery(scope: Any, receive: Any, send: Any) -> None:
            if dict(scope.get("headers", [])).get(b"mcp-method") == b"server/discover":
                await Response(status_code=400)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return without_discovery

    with served(older()) as address:
        port = int(address.rpartition(":")[2])
        context = opened(settings, entry(address))
        world = await context.__aenter__()
        before, _ = await world.hub.listing(world.server)
        assert before.session.about["protocol"] == "2025-11-25"
        assert await world.call("add", 1) == {"sum": 3}
    try:
        with served(older(), port):
            assert await world.call("add", 1) == {"sum": 3}
            after, _ = await world.hub.listing(world.server)
            assert after is not before
    finally:
        await context.__aexit__(None, None, None)


async def test_a_server_of_2025_has_one_session_with_the_declared_headers(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TEST_KEY", "the-key")
    odd = Odd()
    with served(odd.app) as address:
        async with opened(settings, entry(address)) as world:
            assert await asyncio.gather(*(world.call("echo", str(n)) for n in range(5))) == list("01234")
            assert odd.opened == 1
            assert {headers.get("x-key") for headers in odd.headers} == {"the-key"}


async def test_a_session_that_the_server_forgot_is_opened_again(settings: Settings) -> None:
    odd = Odd()
    with served(odd.app) as address:
        async with opened(settings, entry(address)) as world:
            odd.sessions.clear()
            assert await world.call("add_note", "once more") is not None
            assert odd.opened == 2


async def test_a_server_that_cannot_be_reached_is_an_error_of_the_call(settings: Settings) -> None:
    odd = Odd()
    with served(odd.app) as address:
        context = opened(settings, entry(address))
        world = await context.__aenter__()
    try:
        for name in ("echo", "add_note"):
            with pytest.raises(MethodFailedError, match="MCP server odd: the server cannot be reached"):
                await world.call(name, "x")
    finally:
        await context.__aexit__(None, None, None)


async def test_a_refused_key_names_the_fix(settings: Settings) -> None:
    with (
        served(Odd("denied").app) as address,
        pytest.raises(ServerFault, match="status 401; check its `headers`"),
    ):
        async with opened(settings, entry(address)):
            pass


async def test_an_answer_over_the_limit_fails_its_call_only(settings: Settings) -> None:
    with served(Odd().app) as address:
        async with opened(settings, entry(address)) as world:
            with pytest.raises(MethodFailedError, match="more than 8388608 bytes"):
                await world.call("big", bytes=50 << 20)
            assert await world.call("echo", "after") == "after"


async def test_an_answer_that_is_encoded_fails_its_call_and_is_not_decoded(settings: Settings) -> None:
    odd = Odd()
    with served(odd.app) as address:
        async with opened(settings, entry(address)) as world:
            odd.mode = "packed"
            with pytest.raises(MethodFailedError, match="the encoding 'gzip', which was not asked for"):
                await world.call("echo", "x")
            assert {one["accept-encoding"] for one in odd.headers} == {"identity"}
            odd.mode = ""
            assert await world.call("echo", "after") == "after"


async def test_a_listing_without_an_end_is_read_until_it_is_full(settings: Settings) -> None:
    odd = Odd("pages")
    with served(odd.app) as address:
        async with opened(settings, entry(address)) as world:
            assert len(world.plugin.sandbox_methods) == MOST_TOOLS
            assert odd.methods.count("tools/list") == 2
            assert await world.call("echo", "x") == "x"


async def test_a_server_that_ends_its_streams_at_once_is_asked_for_few(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the client may come back after 0 ms."""
    monkeypatch.setattr("nekro.extensions.mcp.client.http.FRESH_SECONDS", 3600.0)
    odd = Odd("restless")
    with served(odd.app) as address:
        async with opened(settings, entry(address)) as world:
            await eventually(lambda: odd.streams >= 10, what="streams")
            for number in range(50):
                assert await world.call("echo", str(number)) == str(number)
            assert odd.streams == 10


async def test_an_endless_event_is_cut(settings: Settings) -> None:
    odd = Odd()
    with served(odd.app) as address:
        async with opened(settings, entry(address)) as world:
            odd.mode = "endless"
            with pytest.raises(MethodFailedError, match="more than 8388608 bytes"):
                await world.call("echo", "x")


async def test_an_answer_that_breaks_off_is_an_unknown_outcome(settings: Settings) -> None:
    odd = Odd()
    with served(odd.app) as address:
        async with opened(settings, entry(address, timeout_seconds=WAIT_SECONDS)) as world:
            odd.mode = "cut"
            with pytest.raises((OutcomeUnknownError, MethodFailedError)):
                await world.call("add_note", "x")
            odd.mode = ""
            assert await world.call("echo", "after") == "after"


async def test_a_call_that_hangs_ends_after_the_declared_time(settings: Settings) -> None:
    odd = Odd()
    with served(odd.app) as address:
        async with opened(settings, entry(address, timeout_seconds=0.5)) as world:
            odd.mode = "hang"
            with pytest.raises(OutcomeUnknownError, match="did not answer in time"):
                await world.call("add_note", "x")


async def test_an_idle_session_is_closed_and_opened_for_the_next_call(settings: Settings) -> None:
    odd = Odd()
    brief = settings.model_copy(update={"mcp": McpSettings(idle_seconds=0.1)})
    with served(odd.app) as address:
        async with opened(brief, entry(address)) as world:
            assert await world.call("echo", "a") == "a"
            listing, _ = await world.hub.listing(world.server)
            await asyncio.wait_for(_gone(world, listing), WAIT_SECONDS)
            assert await world.call("echo", "b") == "b"
            assert odd.opened >= 2


class SlowToClose(Odd):
    """A server that answers the end of a session late."""

    def __init__(self) -> None:
        super().__init__()
        self.is_closing, self.may_close = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()

    async def answer(self, request: Request) -> Response:
        if request.method == "DELETE":
            self._loop.call_soon_threadsafe(self.is_closing.set)
            await asyncio.to_thread(self.may_close.wait, WAIT_SECONDS)
        return await super().answer(request)


async def test_a_call_while_an_idle_session_is_closed_waits_for_the_next_one(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # the server writes there
    odd = SlowToClose()
    brief = settings.model_copy(update={"mcp": McpSettings(idle_seconds=0.1)})
    with served(odd.app) as address:
        try:
            async with opened(brief, entry(address)) as world:
                await asyncio.wait_for(odd.is_closing.wait(), WAIT_SECONDS)
                call = asyncio.create_task(world.call("work_once"))
                await asyncio.wait({call}, timeout=0.1)
                odd.may_close.set()
                assert await call == "worked"
                assert odd.opened >= 2
        finally:
            odd.may_close.set()


async def _gone(world: Any, listing: Any) -> None:
    own = world.hub._own()
    connection = own.connections["odd"][1]
    while connection._opened is listing:
        await asyncio.sleep(0.02)


# -- OAuth ----------------------------------------------------------------------------------------


class Guarded(Odd):
    """The odd server behind OAuth, with its authorization server."""

    #: What its answers name; None: its own addresses.
    metadata: str | None = None
    authorities: tuple[str, ...] | None = None
    tokens_at: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []
        self.tokens: list[tuple[str | None, dict[str, Any]]] = []
        #: What the clients of the authorization server get.
        self.grant: dict[str, Any] = {"access_token": "the-token", "token_type": "Bearer", "expires_in": 3600}

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/mcp", self.guarded, methods=["GET", "POST", "DELETE"]),
                Route("/.well-known/oauth-protected-resource", self.resource),
                Route("/.well-known/oauth-protected-resource/mcp", self.resource),
                Route("/.well-known/oauth-authorization-server", self.authority),
                Route("/token", self.token, methods=["POST"]),
            ]
        )

    async def guarded(self, request: Request) -> Response:
        if request.headers.get("authorization") != "Bearer the-token":
            where = self.metadata or f"{request.base_url}.well-known/oauth-protected-resource"
            challenge = {"www-authenticate": f'Bearer resource_metadata="{where}"'}
            return Response(status_code=401, headers=challenge)
        return await self.answer(request)

    async def resource(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        base = str(request.base_url).rstrip("/")
        authorities = self.authorities or (base,)
        return JSONResponse({"resource": f"{base}/mcp", "authorization_servers": authorities})

    async def authority(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        base = str(request.base_url).rstrip("/")
        tokens_at = self.tokens_at or f"{base}/token"
        return JSONResponse({
            "issuer": base, "authorization_endpoint": f"{base}/authorize", "token_endpoint": tokens_at,
            "response_types_supported": ["code"], "grant_types_supported": ["client_credentials"],
            "token_endpoint_auth_methods_supported": ["client_secret_basic"],
        })  # fmt: skip

    async def token(self, request: Request) -> Response:
        self.tokens.append((request.headers.get("authorization"), dict(await request.form())))
        return JSONResponse(self.grant, status_code=401 if "error" in self.grant else 200)


def with_credentials(address: str) -> dict[str, Any]:
    oauth = {"issuer": address, "client_id": "nekro", "client_secret": "${MCP_TEST_SECRET}"}
    return {"url": f"{address}/mcp", "nekro": {"oauth": oauth}}


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """The declared client secret."""
    monkeypatch.setenv("MCP_TEST_SECRET", "the-client-secret")
    return "the-client-secret"


async def test_credentials_of_oauth_are_exchanged_for_a_token(settings: Settings, secret: str) -> None:
    server = Guarded()
    with served(server.app) as address:
        async with opened(settings, with_credentials(address)) as world:
            assert await world.call("echo", "with a token") == "with a token"
    assert len(server.tokens) == 1 and server.tokens[0][1]["grant_type"] == "client_credentials"
    assert secret not in json.dumps(world.listed.tools)


async def test_a_session_that_is_lost_behind_oauth_is_opened_again(settings: Settings, secret: str) -> None:
    """rust-sdk#689: 401 is about the session, not about the token."""
    server = Guarded()
    server.lost = Response("Unauthorized: Session not found", status_code=401)
    with served(server.app) as address:
        async with opened(settings, with_credentials(address)) as world:
            server.sessions.clear()
            assert await world.call("echo", "again") == "again"
            assert (server.opened, len(server.tokens)) == (2, 2)


async def test_refused_credentials_are_an_error_without_the_secret(settings: Settings, secret: str) -> None:
    server = Guarded()
    server.grant = {"error": "invalid_client", "error_description": f"no {secret}"}
    with served(server.app) as address, pytest.raises(ServerFault, match="invalid_client") as caught:
        async with opened(settings, with_credentials(address)):
            pass
    assert secret not in str(caught.value)


async def test_credentials_are_sent_to_the_declared_issuer_only(settings: Settings, secret: str) -> None:
    server = Guarded()
    with served(server.app) as address, pytest.raises(ServerFault, match="issuer"):
        declared = with_credentials(address)
        declared["nekro"]["oauth"]["issuer"] = "https://auth.example.org"
        async with opened(settings, declared):
            pass
    assert server.tokens == []


@pytest.mark.parametrize("step", ["metadata", "authorities", "tokens_at"])
async def test_oauth_does_not_lead_to_private_addresses_that_nobody_declared(
    settings: Settings, secret: str, step: str
) -> None:
    server, other = Guarded(), Guarded()
    with served(server.app) as address, served(other.app) as private:
        named = {
            "metadata": f"{private}/.well-known/oauth-protected-resource",
            "authorities": (private,),
            "tokens_at": f"{private}/token",
        }
        setattr(server, step, named[step])
        with pytest.raises(ServerFault, match=r"127\.0\.0\.1.*NEKRO_DOWNLOADS__ALLOW_PRIVATE"):
            async with opened(settings, with_credentials(address)):
                pass
    assert (other.paths, other.tokens) == ([], [])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_oauth_leads_to_the_declared_issuer_and_to_allowed_addresses(
    settings: Settings, secret: str, host: str
) -> None:
    server, issuer, tokens = Guarded(), Guarded(), Guarded()
    allowed = DownloadSettings(allow_private=("127.0.0.0/8", "::1"))
    with served(server.app) as address, served(issuer.app) as authority, served(tokens.app) as elsewhere:
        server.authorities = (authority,)
        issuer.tokens_at = f"{elsewhere.replace('127.0.0.1', host)}/token"
        declared = with_credentials(address)
        declared["nekro"]["oauth"]["issuer"] = authority
        async with opened(settings.model_copy(update={"downloads": allowed}), declared) as world:
            assert await world.call("echo", "with a token") == "with a token"
    assert (len(issuer.tokens), len(tokens.tokens)) == (0, 1)


async def test_a_server_that_wants_oauth_names_the_ways_to_declare_it(settings: Settings) -> None:
    with (
        served(Guarded().app) as address,
        pytest.raises(ServerFault, match=r"declare `nekro.oauth`.*a login in a browser is not supported"),
    ):
        async with opened(settings, entry(address)):
            pass


async def test_a_token_by_name_is_a_header(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TEST_TOKEN", "the-token")
    with served(Guarded().app) as address:
        headers = {"Authorization": "Bearer ${MCP_TEST_TOKEN}"}
        async with opened(settings, {"url": f"{address}/mcp", "headers": headers}) as world:
            assert await world.call("echo", "x") == "x"
