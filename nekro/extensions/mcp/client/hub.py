"""The connections of one process to all servers: opens them, calls tools, records what servers report."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from loguru import logger

from broker_config.secret_files import secret_paths
from nekro.base.greenlet_bridge import at_loop_close
from nekro.extensions.mcp.client.tools import ListedTool, line, tools_text
from nekro.extensions.mcp.declarations import Declaration, resolve
from nekro.extensions.mcp.rows import ServerRows
from nekro.extensions.mcp.servers import McpServer, redactor_of
from nekro_agent.errors import (
    CallTimeoutError,
    InvalidValueError,
    MethodFailedError,
    OutcomeUnknownError,
    SandboxUnavailableError,
    StorageError,
)
from nekro_agent.files.private_files import make_directory
from nekro_agent.schemas.agent_ctx import AgentCtx

if TYPE_CHECKING:
    from broker_config.settings import Settings
    from nekro.extensions.mcp.client.connection import Opened, ServerConnection
    from nekro.extensions.mcp.client.faults import ServerFault
    from nekro.extensions.mcp.client.session import Exchange, McpSession
    from nekro.extensions.mcp.client.tools import Listing
    from nekro.extensions.mcp.server_requests import ServerRequests
    from nekro.sandbox.programs import Program, ProgramStarter
    from storage.engine import Database

__all__ = ["SDK_MISSING", "SERVER_ERROR", "Listings", "ServerHub", "has_sdk"]

#: Type of the error that code gets when a server cannot be used.
SERVER_ERROR: Final = "McpServerError"
SDK_MISSING: Final = (
    "this worker has no MCP SDK; install the extra (pip install 'nekro-workers[mcp]') "
    "and start the worker again"
)
#: How long the servers of an event loop have to end when it closes.
_CLOSE_SECONDS: Final = 15.0


def has_sdk() -> bool:
    """Whether the protocol's SDK is installed; does not import it."""
    return importlib.util.find_spec("mcp") is not None and importlib.util.find_spec("mcp_types") is not None


class Listings:
    """Records what servers listed, so that every worker builds the same methods."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def listed(self, server: McpServer, tools: str, about: dict[str, Any]) -> None:
        """Record the tools of a server, as ``tools_text`` writes them."""
        async with self._database.autocommit() as transaction:
            changed = await ServerRows(transaction.connection).listed(
                server.name, digest=server.digest, tools=tools, about=about
            )
        if changed:
            logger.bind(server=server.name, bytes=len(tools)).info("mcp_server_listed")

    async def failed(self, server: McpServer, error: str) -> None:
        """Record why a server could not be listed."""
        async with self._database.autocommit() as transaction:
            await ServerRows(transaction.connection).failed(server.name, digest=server.digest, error=error)


class ServerHub:
    """Talks to servers; one instance per process. A connection belongs to the event loop that uses it."""

    def __init__(
        self, settings: Settings, listings: Listings | None, requests: ServerRequests | None = None
    ) -> None:
        """
        Args:
            listings: records what servers list; None records nothing.
            requests: asks models and people for servers; None refuses that.
        """
        self._settings, self._listings, self._requests = settings, listings, requests
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = WeakKeyDictionary()
        self._starter: ProgramStarter | None = None

    async def start(self, server: McpServer, *, holder: object) -> None:
        """Keep a session with a stdio server until each of its holders has stopped it; returns at once."""
        own = self._own()
        own.holders.setdefault(server.name, set()).add(holder)
        async with own.lock(server.name):
            (await self._connection(own, server)).start()

    async def stop(self, server: McpServer, *, holder: object) -> None:
        """End what ``start`` began."""
        own = self._own()
        holders = own.holders.get(server.name, set())
        holders.discard(holder)
        if not holders:
            async with own.lock(server.name):
                # Not one of a later declaration, which may have no holders.
                if own.connections.get(server.name, ("", None))[0] == server.digest:
                    await own.close(server.name)

    async def keep_only(self, servers: Collection[McpServer]) -> None:
        """Close the connections of this loop to servers that are not declared so any more."""
        own = self._own()
        digests = {server.name: server.digest for server in servers if server.is_enabled}

        async def close(name: str) -> None:
            async with own.lock(name):
                digest, _ = own.connections.get(name, (None, None))
                if digest is not None and digests.get(name) != digest and not own.holders.get(name):
                    await own.close(name)

        # Together: closing a server that does not answer takes time.
        await asyncio.gather(*map(close, list(own.connections)))

    async def listing(self, server: McpServer) -> tuple[Opened, Listing]:
        """List the tools of a server now; returns its session and what it listed.

        Raises:
            ServerFault: it cannot be opened, or failed.
        """
        own = self._own()
        async with own.lock(server.name):
            connection = await self._connection(own, server)
        return await connection.listing()

    async def call(
        self, server: McpServer, tool: ListedTool, arguments: dict[str, Any], ctx: AgentCtx
    ) -> Any:
        """Call a tool and return its value.

        It is called once more if the server did not know the session, and therefore did not run it. A tool
        that may run again is called once more if the server was lost meanwhile, too.

        Raises:
            MethodFailedError: the tool reports an error, or the server cannot be used.
            CallTimeoutError: the server did not answer in the time of its declaration.
            OutcomeUnknownError: the server was lost, or too slow, in a call that must not run twice.
        """
        from nekro.extensions.mcp.client.faults import ServerFault
        from nekro.extensions.mcp.client.tool_calls import exchange_of, value_of

        declaration = _declared(server)
        hide = redactor_of(declaration)
        exchange = exchange_of(
            ctx,
            server=server,
            tool=f"{server.plugin_key}.{tool.name}",
            requests=self._requests,
        )
        may_try_again = True
        while True:
            try:
                result = await self._call_once(server, tool, arguments, exchange)
                break
            except ServerFault as exc:
                is_again = (exc.is_lost or exc.is_doubtful) and tool.may_repeat
                is_again |= exc.is_refused or (exc.is_unsent and not declaration.is_stdio)
                if not (is_again and may_try_again):
                    raise self._error(server, tool, exc) from None
                may_try_again = False
            except (InvalidValueError, SandboxUnavailableError) as exc:
                raise MethodFailedError(SERVER_ERROR, hide(str(exc))) from None
        name = f"{server.module}-{(ctx.call_id or 'call')[:8]}"
        return await value_of(result, ctx, tool=tool, file_name=name, hide=hide)

    async def _call_once(
        self, server: McpServer, tool: ListedTool, arguments: dict[str, Any], exchange: Exchange
    ) -> Any:
        own = self._own()
        async with own.lock(server.name):
            connection = await self._connection(own, server)
        limits = _declared(server).nekro
        seconds = limits.timeout_seconds
        if seconds is not None:
            seconds += limits.elicitation_seconds or 0.0  # a person's time is not the server's
        return await connection.call(tool.name, arguments, exchange=exchange, seconds=seconds)

    @staticmethod
    def _error(server: McpServer, tool: ListedTool, fault: ServerFault) -> Exception:
        text = f"MCP server {server.name}: {fault}"
        if (fault.is_lost or fault.is_late) and not tool.may_repeat:
            return OutcomeUnknownError(
                f"{text}; the effect of {tool.name} may or may not have happened; check before you repeat it"
            )
        return CallTimeoutError(text) if fault.is_late else MethodFailedError(SERVER_ERROR, text)

    async def close(self) -> None:
        """Close the connections of the running loop."""
        own = self._by_loop.get(asyncio.get_running_loop())
        if own is not None:
            await asyncio.gather(*(own.close(name) for name in list(own.connections)))

    def _own(self) -> _Loop:
        if not has_sdk():
            raise MethodFailedError(SERVER_ERROR, SDK_MISSING)
        loop = asyncio.get_running_loop()
        own = self._by_loop.get(loop)
        if own is None:
            own = self._by_loop[loop] = _Loop()
            at_loop_close(self.close, seconds=_CLOSE_SECONDS, what="MCP servers")
        return own

    async def _connection(self, own: _Loop, server: McpServer) -> ServerConnection:
        """Return the connection with a server; one of a former declaration is closed. Needs the lock."""
        digest = server.digest
        known = own.connections.get(server.name)
        if known is not None and known[0] == digest:
            return known[1]
        await own.close(server.name, grace=True)
        await asyncio.to_thread(_import_sdk)
        connection = self._new_connection(server)
        own.connections[server.name] = (digest, connection)
        return connection

    def _new_connection(self, server: McpServer) -> ServerConnection:
        from nekro.extensions.mcp.client.connection import ServerConnection

        hide = redactor_of(_declared(server))
        is_stdio = _declared(server).is_stdio
        shown: list[dict[str, Any]] = []

        async def on_listed(listing: Listing, about: dict[str, Any]) -> None:
            nonlocal shown
            notes = listing.described_notes()
            for note in notes if notes != shown else ():
                logger.bind(server=server.name, **note).warning("mcp_tool_is_faulty")
            shown = notes
            if self._listings is not None:
                try:
                    await self._listings.listed(server, tools_text(listing.tools), {**about, "notes": notes})
                except StorageError as exc:  # the next listing records it
                    logger.bind(server=server.name, error=str(exc)).warning("mcp_listing_not_recorded")

        async def on_failed(error: str) -> None:
            if self._listings is not None:
                try:
                    await self._listings.failed(server, error)
                except StorageError as exc:  # as above
                    logger.bind(server=server.name, error=str(exc)).warning("mcp_listing_not_recorded")

        return ServerConnection(
            server.name,
            lambda first: (
                self._open_stdio(server, hide, first) if is_stdio else self._open_http(server, hide, first)
            ),
            stays=is_stdio,
            start_seconds=self._settings.plugins.start_seconds,
            idle_seconds=self._settings.mcp.idle_seconds,
            initialize_first=server.is_current and (server.about or {}).get("starts_with") == "initialize",
            hide=hide,
            on_listed=on_listed,
            on_failed=on_failed,
        )

    @asynccontextmanager
    async def _open_stdio(
        self, server: McpServer, hide: Callable[[str], str], initialize_first: bool
    ) -> AsyncIterator[Opened]:
        from nekro.extensions.mcp.client.connection import Opened
        from nekro.extensions.mcp.client.stdio import StdioTransport

        program = await self._run(server)
        try:
            most_bytes = self._settings.mcp.message_bytes
            transport = StdioTransport(program, name=server.name, most_bytes=most_bytes, hide=hide)
            async with (
                transport as streams,
                self._session(server, streams, hide, initialize_first) as session,
            ):
                yield Opened(
                    session,
                    ended=transport.ended,
                    why_it_ended=transport.why_it_ended,
                    verify=program.verify,
                    confinement=program.confinement,
                )
        finally:
            await program.close()

    async def _run(self, server: McpServer) -> Program:
        from nekro.sandbox.programs import ProgramSpec, ProgramStarter

        declaration, name = _declared(server), server.name
        limits = declaration.nekro
        spec = ProgramSpec(
            key=f"mcp:{server.module}",
            command=tuple(
                resolve(word, name=name) for word in (declaration.command or "", *declaration.args)
            ),
            environment={key: resolve(value, name=name) for key, value in declaration.env.items()},
            home=await asyncio.to_thread(self._home, server.module),
            files={Path(path): access == "rw" for path, access in limits.files.items()},
            secrets=secret_paths(self._settings),
            network=limits.network,
            memory_bytes=limits.memory_bytes,
            max_processes=limits.max_processes,
        )
        if self._starter is None:
            self._starter = ProgramStarter(self._settings.sandbox)
        try:
            return await self._starter.start(spec)
        except SandboxUnavailableError as exc:
            if not self._settings.mcp.allow_unconfined:
                raise
            logger.bind(server=name, error=line(exc, 500)).warning("mcp_server_not_confined")
            return await self._starter.start_unconfined(spec)

    def _home(self, module: str) -> Path:
        return make_directory(self._settings.data_dir / "mcp" / module)

    @asynccontextmanager
    async def _open_http(
        self, server: McpServer, hide: Callable[[str], str], initialize_first: bool
    ) -> AsyncIterator[Opened]:
        from mcp.client.streamable_http import streamable_http_client

        from nekro.extensions.mcp.client.connection import Opened
        from nekro.extensions.mcp.client.http import (
            OriginTransport,
            auth_of,
            certificates,
            http_client,
        )
        from nekro_agent.downloads.addresses import AddressPolicy

        declaration, most_bytes = _declared(server), self._settings.mcp.message_bytes
        url = resolve(declaration.url or "", name=server.name)
        headers = {key: resolve(value, name=server.name) for key, value in declaration.headers.items()}
        oauth = declaration.nekro.oauth
        auth = auth_of(oauth, url, name=server.name)
        await asyncio.to_thread(certificates)
        issuers = () if oauth is None else (resolve(oauth.issuer, name=server.name),)
        client_of_session = http_client(
            headers,
            transport=OriginTransport((url, *issuers), AddressPolicy(self._settings.downloads.allow_private)),
            most_bytes=most_bytes,
            hide=hide,
            auth=auth,
            person_seconds=declaration.nekro.elicitation_seconds or 0.0,
        )
        async with client_of_session as client:
            transport = streamable_http_client(url, http_client=client, max_sse_event_size=most_bytes)
            async with (
                transport as streams,
                self._session(server, streams, hide, initialize_first) as session,
            ):
                yield Opened(session)

    def _session(
        self,
        server: McpServer,
        streams: tuple[Any, Any],
        hide: Callable[[str], str],
        initialize_first: bool,
    ) -> McpSession:
        from nekro.extensions.mcp.client.session import McpSession

        limits = _declared(server).nekro
        return McpSession(
            server.name,
            streams,
            hide=hide,
            initialize_first=initialize_first,
            samples=self._requests is not None and limits.sampling is not None,
            asks=self._requests is not None and limits.elicitation_seconds is not None,
        )


class _Loop:
    """The connections of one event loop."""

    def __init__(self) -> None:
        #: Server name → digest of its declaration, connection.
        self.connections: dict[str, tuple[str, ServerConnection]] = {}
        self.holders: dict[str, set[object]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock for opening and closing the connection with a server."""
        return self._locks.setdefault(name, asyncio.Lock())

    async def close(self, name: str, *, grace: bool = False) -> None:
        """Close the connection with a server, if there is one."""
        known = self.connections.pop(name, None)
        if known is not None:
            await known[1].close(grace=grace)


def _declared(server: McpServer) -> Declaration:
    if server.declaration is None:
        raise MethodFailedError(SERVER_ERROR, server.error or f"MCP server {server.name} is not declared")
    return server.declaration


def _import_sdk() -> None:
    """Import what connections use, which takes seconds of processor time and must not block a loop."""
    for name in (
        "mcp.client.streamable_http",
        "nekro.extensions.mcp.client.connection",
        "nekro.extensions.mcp.client.http",
        "nekro.extensions.mcp.client.stdio",
        "nekro.sandbox.programs",
    ):
        importlib.import_module(name)
