"""The two clients; the asynchronous one has the same methods, which are coroutines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from types import TracebackType

import httpx
from pydantic import JsonValue

from nekro_client import endpoints
from nekro_client.async_chats import AsyncChat
from nekro_client.async_work import (
    AsyncApprovals,
    AsyncDeadLetters,
    AsyncJobs,
    AsyncKeys,
    AsyncTimers,
    AsyncTurns,
)
from nekro_client.bodies import call_body, run_body
from nekro_client.chats import Chat
from nekro_client.connections import AsyncConnection, Connection
from nekro_client.models import (
    Act,
    Call,
    ChatSummary,
    Command,
    CommandBody,
    CommandResult,
    CostGroup,
    Costs,
    Level,
    McpServer,
    McpServerBody,
    McpTrial,
    Method,
    Page,
    Plugin,
    PluginConfig,
    PluginState,
    Queues,
    Run,
    Worker,
)
from nekro_client.operations import RETRY_SECONDS
from nekro_client.runs import AsyncRunStream, RunStream
from nekro_client.streams import AsyncChangeStream, ChangeCursor, ChangeStream
from nekro_client.work import Approvals, DeadLetters, Jobs, Keys, Timers, Turns

__all__ = ["AsyncClient", "Client"]


class Client:
    """A connection to a gateway; thread-safe, usable as a context manager.

    A request that fails in passing (connection lost, 429, 503) is sent again with growing pauses. A POST has
    an idempotency key, so the gateway does what it asks for once.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect on first use.

        Args:
            url: of the gateway, as ``https://agent.example.org``; None reads ``NEKRO_URL``.
            key: ``nk_…``; None reads ``NEKRO_KEY``; "" sends none, which a gateway on this host permits.
            retry_seconds: how long a request that fails in passing is repeated; 0: not at all.
            transport: for tests and special networks; None is httpx's.

        Raises:
            ClientError: there is no URL, or it is not one of HTTP.
        """
        self._connection = Connection(url, key, retry_seconds=retry_seconds, transport=transport)
        self.turns = Turns(self._connection)
        self.jobs = Jobs(self._connection)
        self.approvals = Approvals(self._connection)
        self.timers = Timers(self._connection)
        self.dead_letters = DeadLetters(self._connection)
        self.keys = Keys(self._connection)

    def __enter__(self) -> Client:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def chat(self, key: str) -> Chat:
        """Return a chat by its key; it need not exist yet.

        Raises:
            ValueError: it cannot be a chat key.
        """
        return Chat(self._connection, key)

    def chats(
        self,
        text: str = "",
        *,
        failures_since: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[ChatSummary]:
        """Return a page of chats, the one with the newest activity first.

        Args:
            text: only chats whose key or name contains it; "" means all.
            failures_since: also count the turns that have failed since then.
        """
        return self._connection.send(
            endpoints.list_chats(text=text, failures_since=failures_since, cursor=cursor, limit=limit)
        )

    def changes(self, *, give_up_seconds: float | None = 300) -> ChangeStream:
        """Return hints about what changes, without end: which list to read again.

        It begins with the hint ``reset``: read what you show. It comes again when hints may have been missed,
        after a lost connection for example. ``close`` ends the stream.

        Args:
            give_up_seconds: how long the gateway may be out of reach; None means for ever.
        """
        return ChangeStream(self._connection.http, ChangeCursor(give_up_seconds=give_up_seconds))

    def audit(
        self,
        *,
        action: str | None = None,
        subject: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[Act]:
        """Return a page of administrative acts, the newest first.

        Args:
            action: only acts that begin with it, such as ``dead_letter.``; None means all.
            subject: only acts on this; None means all.
        """
        return self._connection.send(
            endpoints.list_acts(action=action, subject=subject, cursor=cursor, limit=limit)
        )

    def run(
        self,
        code: str,
        *,
        chat_key: str,
        user_id: str | None = None,
        follow_up: bool = False,
        timeout_seconds: float | None = None,
        seconds: float = 600,
        idempotency_key: str | None = None,
    ) -> Run:
        """Run code in the chat's sandbox; a run is stopped when the connection is lost.

        Args:
            follow_up: whether an AGENT result requests a round.
            timeout_seconds: how long it may take, with the wait for a worker; None: as the fleet allows.
            seconds: how long to wait for the report.
        """
        body = run_body(code, chat_key, user_id, follow_up, timeout_seconds)
        return self._connection.send(endpoints.run(body, seconds=seconds, idempotency_key=idempotency_key))

    def stream_run(
        self,
        code: str,
        *,
        chat_key: str,
        user_id: str | None = None,
        follow_up: bool = False,
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> RunStream:
        """Run code as ``run`` does; returns its output, piece by piece while it runs, and then its report."""
        body = run_body(code, chat_key, user_id, follow_up, timeout_seconds)
        return RunStream(self._connection, endpoints.run(body, seconds=0, idempotency_key=idempotency_key))

    def call(
        self,
        method: str,
        args: Sequence[JsonValue] = (),
        kwargs: Mapping[str, JsonValue] | None = None,
        *,
        chat_key: str,
        user_id: str | None = None,
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> Call:
        """Call a method of a plugin; a call that fails is an ``ApiError``.

        Args:
            timeout_seconds: None means the limit of the method's lane.
        """
        body = call_body(method, args, kwargs, chat_key, user_id, timeout_seconds)
        return self._connection.send(endpoints.call(body, idempotency_key=idempotency_key))

    def command(
        self,
        chat_key: str,
        line: str,
        *,
        user_id: str | None = None,
        level: Level = "user",
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> CommandResult:
        """Run a plugin's command, or answer the last one that asked; a failed command is a result.

        Args:
            line: ``/name arguments``, or an answer.
            timeout_seconds: None means the limit of calls.
        """
        body = CommandBody(
            chat_key=chat_key, line=line, user_id=user_id, level=level, timeout_seconds=timeout_seconds
        )
        return self._connection.send(endpoints.command(body, idempotency_key=idempotency_key))

    def commands(self) -> list[Command]:
        """Return the commands of the plugins."""
        return self._connection.all(lambda cursor: endpoints.list_commands(cursor=cursor))

    def methods(self) -> list[Method]:
        """Return the methods that code may call."""
        return self._connection.all(lambda cursor: endpoints.list_methods(cursor=cursor))

    def plugins(self) -> list[Plugin]:
        """Return the plugins, also those that failed to load."""
        return self._connection.all(lambda cursor: endpoints.list_plugins(cursor=cursor))

    def enable_plugin(self, key: str, *, is_enabled: bool = True) -> PluginState:
        """Enable a plugin on all workers, or disable it; the answer says whether that changed anything."""
        return self._connection.send(endpoints.decide_plugin(key, is_enabled=is_enabled))

    def mcp_servers(self) -> list[McpServer]:
        """Return the declared MCP servers; literal secrets are masked."""
        return self._connection.all(lambda cursor: endpoints.list_mcp_servers(cursor=cursor))

    def put_mcp_server(
        self, name: str, declaration: Mapping[str, JsonValue], *, is_enabled: bool = True
    ) -> McpServer:
        """Declare an MCP server, as in ``mcp.json``, or replace its declaration."""
        body = McpServerBody(declaration=dict(declaration), is_enabled=is_enabled)
        return self._connection.send(endpoints.put_mcp_server(name, body))

    def remove_mcp_server(self, name: str) -> McpServer:
        """Remove an MCP server; returns what it was."""
        return self._connection.send(endpoints.remove_mcp_server(name))

    def test_mcp_server(self, name: str) -> McpTrial:
        """Connect with an MCP server on the worker that uses it; ``error`` is None if it works."""
        return self._connection.send(endpoints.test_mcp_server(name))

    def plugin_config(self, key: str) -> PluginConfig:
        """Return a plugin's configuration with its JSON schema; secrets are masked."""
        return self._connection.send(endpoints.get_plugin_config(key))

    def set_plugin_config(self, key: str, values: Mapping[str, JsonValue]) -> PluginConfig:
        """Change fields of a plugin's configuration on all workers; returns the new one."""
        return self._connection.send(endpoints.set_plugin_config(key, values))

    def ready(self) -> None:
        """Return if the gateway and its database answer.

        Raises:
            UnavailableError: the database does not.
            UnreachableError: the gateway does not.
        """
        self._connection.send(endpoints.readiness())

    def workers(self) -> list[Worker]:
        """Return the workers that are alive."""
        return self._connection.send(endpoints.list_workers()).items

    def costs(
        self,
        *,
        by: CostGroup = "day",
        since: date | None = None,
        until: date | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Costs:
        """Return a page of what was spent; the first page has the budgets of today too.

        Args:
            since, until: days (UTC), both included; None does not limit.
        """
        request = endpoints.get_costs(by=by, since=since, until=until, cursor=cursor, limit=limit)
        return self._connection.send(request)

    def queues(self) -> Queues:
        """Return what waits and runs in the queues, as rounds and as jobs."""
        return self._connection.send(endpoints.get_queues())


class AsyncClient:
    """As ``Client``, for one event loop; an asynchronous context manager."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect on first use.

        Args:
            url: of the gateway, as ``https://agent.example.org``; None reads ``NEKRO_URL``.
            key: ``nk_…``; None reads ``NEKRO_KEY``; "" sends none, which a gateway on this host permits.
            retry_seconds: how long a request that fails in passing is repeated; 0: not at all.
            transport: for tests and special networks; None is httpx's.

        Raises:
            ClientError: there is no URL, or it is not one of HTTP.
        """
        self._connection = AsyncConnection(url, key, retry_seconds=retry_seconds, transport=transport)
        self.turns = AsyncTurns(self._connection)
        self.jobs = AsyncJobs(self._connection)
        self.approvals = AsyncApprovals(self._connection)
        self.timers = AsyncTimers(self._connection)
        self.dead_letters = AsyncDeadLetters(self._connection)
        self.keys = AsyncKeys(self._connection)

    async def __aenter__(self) -> AsyncClient:
        """Return the client."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    def chat(self, key: str) -> AsyncChat:
        """Return a chat by its key; it need not exist yet.

        Raises:
            ValueError: it cannot be a chat key.
        """
        return AsyncChat(self._connection, key)

    async def chats(
        self,
        text: str = "",
        *,
        failures_since: datetime | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[ChatSummary]:
        """Return a page of chats, the one with the newest activity first.

        Args:
            text: only chats whose key or name contains it; "" means all.
            failures_since: also count the turns that have failed since then.
        """
        return await self._connection.send(
            endpoints.list_chats(text=text, failures_since=failures_since, cursor=cursor, limit=limit)
        )

    def changes(self, *, give_up_seconds: float | None = 300) -> AsyncChangeStream:
        """Return hints about what changes, without end: which list to read again.

        It begins with the hint ``reset``: read what you show. It comes again when hints may have been missed,
        after a lost connection for example. ``close`` ends the stream.

        Args:
            give_up_seconds: how long the gateway may be out of reach; None means for ever.
        """
        return AsyncChangeStream(self._connection.http, ChangeCursor(give_up_seconds=give_up_seconds))

    async def audit(
        self,
        *,
        action: str | None = None,
        subject: str | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Page[Act]:
        """Return a page of administrative acts, the newest first.

        Args:
            action: only acts that begin with it, such as ``dead_letter.``; None means all.
            subject: only acts on this; None means all.
        """
        return await self._connection.send(
            endpoints.list_acts(action=action, subject=subject, cursor=cursor, limit=limit)
        )

    async def run(
        self,
        code: str,
        *,
        chat_key: str,
        user_id: str | None = None,
        follow_up: bool = False,
        timeout_seconds: float | None = None,
        seconds: float = 600,
        idempotency_key: str | None = None,
    ) -> Run:
        """Run code in the chat's sandbox; a run is stopped when the connection is lost.

        Args:
            follow_up: whether an AGENT result requests a round.
            timeout_seconds: how long it may take, with the wait for a worker; None: as the fleet allows.
            seconds: how long to wait for the report.
        """
        body = run_body(code, chat_key, user_id, follow_up, timeout_seconds)
        return await self._connection.send(
            endpoints.run(body, seconds=seconds, idempotency_key=idempotency_key)
        )

    def stream_run(
        self,
        code: str,
        *,
        chat_key: str,
        user_id: str | None = None,
        follow_up: bool = False,
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncRunStream:
        """Run code as ``run`` does; returns its output, piece by piece while it runs, and then its report."""
        body = run_body(code, chat_key, user_id, follow_up, timeout_seconds)
        return AsyncRunStream(
            self._connection, endpoints.run(body, seconds=0, idempotency_key=idempotency_key)
        )

    async def call(
        self,
        method: str,
        args: Sequence[JsonValue] = (),
        kwargs: Mapping[str, JsonValue] | None = None,
        *,
        chat_key: str,
        user_id: str | None = None,
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> Call:
        """Call a method of a plugin; a call that fails is an ``ApiError``.

        Args:
            timeout_seconds: None means the limit of the method's lane.
        """
        body = call_body(method, args, kwargs, chat_key, user_id, timeout_seconds)
        return await self._connection.send(endpoints.call(body, idempotency_key=idempotency_key))

    async def command(
        self,
        chat_key: str,
        line: str,
        *,
        user_id: str | None = None,
        level: Level = "user",
        timeout_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> CommandResult:
        """Run a plugin's command, or answer the last one that asked; a failed command is a result.

        Args:
            line: ``/name arguments``, or an answer.
            timeout_seconds: None means the limit of calls.
        """
        body = CommandBody(
            chat_key=chat_key, line=line, user_id=user_id, level=level, timeout_seconds=timeout_seconds
        )
        return await self._connection.send(endpoints.command(body, idempotency_key=idempotency_key))

    async def commands(self) -> list[Command]:
        """Return the commands of the plugins."""
        return await self._connection.all(lambda cursor: endpoints.list_commands(cursor=cursor))

    async def methods(self) -> list[Method]:
        """Return the methods that code may call."""
        return await self._connection.all(lambda cursor: endpoints.list_methods(cursor=cursor))

    async def plugins(self) -> list[Plugin]:
        """Return the plugins, also those that failed to load."""
        return await self._connection.all(lambda cursor: endpoints.list_plugins(cursor=cursor))

    async def enable_plugin(self, key: str, *, is_enabled: bool = True) -> PluginState:
        """Enable a plugin on all workers, or disable it; the answer says whether that changed anything."""
        return await self._connection.send(endpoints.decide_plugin(key, is_enabled=is_enabled))

    async def mcp_servers(self) -> list[McpServer]:
        """Return the declared MCP servers; literal secrets are masked."""
        return await self._connection.all(lambda cursor: endpoints.list_mcp_servers(cursor=cursor))

    async def put_mcp_server(
        self, name: str, declaration: Mapping[str, JsonValue], *, is_enabled: bool = True
    ) -> McpServer:
        """Declare an MCP server, as in ``mcp.json``, or replace its declaration."""
        body = McpServerBody(declaration=dict(declaration), is_enabled=is_enabled)
        return await self._connection.send(endpoints.put_mcp_server(name, body))

    async def remove_mcp_server(self, name: str) -> McpServer:
        """Remove an MCP server; returns what it was."""
        return await self._connection.send(endpoints.remove_mcp_server(name))

    async def test_mcp_server(self, name: str) -> McpTrial:
        """Connect with an MCP server on the worker that uses it; ``error`` is None if it works."""
        return await self._connection.send(endpoints.test_mcp_server(name))

    async def plugin_config(self, key: str) -> PluginConfig:
        """Return a plugin's configuration with its JSON schema; secrets are masked."""
        return await self._connection.send(endpoints.get_plugin_config(key))

    async def set_plugin_config(self, key: str, values: Mapping[str, JsonValue]) -> PluginConfig:
        """Change fields of a plugin's configuration on all workers; returns the new one."""
        return await self._connection.send(endpoints.set_plugin_config(key, values))

    async def ready(self) -> None:
        """Return if the gateway and its database answer.

        Raises:
            UnavailableError: the database does not.
            UnreachableError: the gateway does not.
        """
        await self._connection.send(endpoints.readiness())

    async def workers(self) -> list[Worker]:
        """Return the workers that are alive."""
        return (await self._connection.send(endpoints.list_workers())).items

    async def costs(
        self,
        *,
        by: CostGroup = "day",
        since: date | None = None,
        until: date | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Costs:
        """Return a page of what was spent; the first page has the budgets of today too.

        Args:
            since, until: days (UTC), both included; None does not limit.
        """
        request = endpoints.get_costs(by=by, since=since, until=until, cursor=cursor, limit=limit)
        return await self._connection.send(request)

    async def queues(self) -> Queues:
        """Return what waits and runs in the queues, as rounds and as jobs."""
        return await self._connection.send(endpoints.get_queues())
