"""MCP servers: their declarations, what workers know about them, and answers to their questions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from broker_config.secret_files import secret_paths
from nekro.extensions.mcp.declarations import parse
from nekro.extensions.mcp.questions import answer_question
from nekro.extensions.mcp.rows import ServerRows
from nekro.extensions.mcp.servers import McpServer as DeclaredServer
from nekro.extensions.mcp.servers import describe_server, read_servers
from nekro.operations.actor import Actor, Scope
from nekro_agent.errors import NotFoundError
from nekro_client.models import McpReply, McpReplyBody, McpServer, McpServerBody, McpTrial, Page
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.states import StoredKind

if TYPE_CHECKING:
    from nekro.app.services import Services

__all__ = [
    "answer_mcp_question",
    "declared_server",
    "delete_mcp_server",
    "list_mcp_servers",
    "put_mcp_server",
    "test_mcp_server",
]


async def list_mcp_servers(actor: Actor) -> Page[McpServer]:
    """List the declared MCP servers, all on one page; literal secrets are masked."""
    actor.identity.require_all(Scope.ADMIN)
    return Page(items=[_answer(server) for server in await _servers(actor.services)])


async def put_mcp_server(actor: Actor, name: str, body: McpServerBody) -> McpServer:
    """Declare an MCP server, or replace its declaration; workers have it within a second."""
    actor.identity.require_all(Scope.ADMIN)
    services = actor.services
    declaration, is_enabled = parse(name, body.declaration, secrets=secret_paths(services.settings))
    async with services.database.begin() as transaction:
        await ServerRows(transaction.connection).put(
            name, json.loads(declaration.to_json()), is_enabled=is_enabled and body.is_enabled
        )
        # Without the declaration, which may contain secrets.
        await actor.record(transaction, "mcp.declare", name)
        size = ROW_BYTES + size_of(declaration.to_json())
        await transaction.stored_bytes.hold(actor.identity.key_id, _item(name), StoredKind.DECLARATIONS, size)
    return _answer(await declared_server(services, name))


async def delete_mcp_server(actor: Actor, name: str) -> McpServer:
    """Remove a server that the database declares; one of a worker's file is removed there."""
    actor.identity.require_all(Scope.ADMIN)
    services = actor.services
    server = await declared_server(services, name)
    async with services.database.begin() as transaction:
        if not await ServerRows(transaction.connection).remove(name):
            raise NotFoundError(f"the database declares no MCP server {name!r}; a file of the workers does")
        await actor.record(transaction, "mcp.remove", name)
        await transaction.stored_bytes.release(_item(name))
    return _answer(server)


async def test_mcp_server(actor: Actor, name: str) -> McpTrial:
    """Connect with a server on the worker that uses it; a server that does not work is an answer too."""
    actor.identity.require_all(Scope.ADMIN)
    server = await declared_server(actor.services, name)

    async def work() -> McpTrial:
        from nekro.extensions.mcp.follower import try_on_worker

        return McpTrial.model_validate(await try_on_worker(actor.services, server.plugin_key))

    return await actor.once.run(McpTrial, work)


async def answer_mcp_question(actor: Actor, question_id: str, body: McpReplyBody) -> McpReply:
    """Answer a server's question to a person, or decline to; the call that asks continues."""
    actor.identity.require_all(Scope.ADMIN)
    services = actor.services

    async def work() -> McpReply:
        call_id = await answer_question(
            services.database, question_id, body.model_dump(mode="json", exclude_none=True)
        )
        async with services.database.begin() as transaction:
            await actor.record(transaction, "mcp.answer", question_id, {"action": body.action})
        return McpReply(call_id=call_id)

    # The call does not wait for an answer that it has.
    return await actor.once.run(McpReply, work, is_repeatable=False)


def _item(name: str) -> str:
    return f"{StoredKind.DECLARATIONS}:mcp:{name}"


async def _servers(services: Services) -> list[DeclaredServer]:
    return await read_servers(services.settings, services.database)


async def declared_server(services: Services, name: str) -> DeclaredServer:
    """Return a declared server.

    Raises:
        NotFoundError: there is none of this name.
    """
    for server in await _servers(services):
        if server.name == name:
            return server
    raise NotFoundError(f"there is no MCP server {name!r}; `nekro mcp` lists them")


def _answer(server: DeclaredServer) -> McpServer:
    return McpServer.model_validate(describe_server(server))
