"""MCP servers: their declarations, and what workers know about them."""

from __future__ import annotations

import json
from typing import Final

from fastapi import APIRouter

from broker_config.secret_files import secret_paths
from nekro.app.services import Services
from nekro.extensions.mcp.declarations import parse
from nekro.extensions.mcp.rows import ServerRows
from nekro.extensions.mcp.server import endpoint
from nekro.extensions.mcp.servers import McpServer, describe_server, read_servers
from nekro.gateway.document.examples import BEGUN, Examples
from nekro.gateway.extensions import GatewayPart
from nekro.gateway.operation_routes import route
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations.actor import Actor, Scope
from nekro_agent.errors import NotFoundError
from nekro_client.models import McpServer as Answer
from nekro_client.models import McpServerBody, McpTrial, Page
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.states import StoredKind

__all__ = ["GATEWAY_PART"]

router = APIRouter(route_class=KeyedRoute, tags=["mcp"])


async def list_mcp_servers(actor: Actor) -> Page[Answer]:
    """List the declared MCP servers, all on one page; literal secrets are masked."""
    actor.identity.require_all(Scope.ADMIN)
    return Page(items=[_answer(server) for server in await _servers(actor.services)])


async def put_mcp_server(actor: Actor, name: str, body: McpServerBody) -> Answer:
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
        payer, kind = actor.identity.key_id, StoredKind.DECLARATIONS
        await transaction.stored_bytes.hold(payer, _item(name), kind, size)
    return _answer(await _server(services, name))


async def delete_mcp_server(actor: Actor, name: str) -> Answer:
    """Remove a server that the database declares; one of a worker's file is removed there."""
    actor.identity.require_all(Scope.ADMIN)
    server = await _server(actor.services, name)
    async with actor.services.database.begin() as transaction:
        if not await ServerRows(transaction.connection).remove(name):
            raise NotFoundError(f"the database declares no MCP server {name!r}; a file of the workers does")
        await actor.record(transaction, "mcp.remove", name)
        await transaction.stored_bytes.release(_item(name))
    return _answer(server)


async def test_mcp_server(actor: Actor, name: str) -> McpTrial:
    """Connect with a server on the worker that uses it; a server that does not work is an answer too."""
    actor.identity.require_all(Scope.ADMIN)
    server = await _server(actor.services, name)

    async def work() -> McpTrial:
        from nekro.extensions.mcp.follower import try_on_worker

        return McpTrial.model_validate(await try_on_worker(actor.services, server.plugin_key))

    return await actor.once.run(McpTrial, work)


def _item(name: str) -> str:
    return f"{StoredKind.DECLARATIONS}:mcp:{name}"


async def _servers(services: Services) -> list[McpServer]:
    return await read_servers(services.settings, services.database)


async def _server(services: Services, name: str) -> McpServer:
    for server in await _servers(services):
        if server.name == name:
            return server
    raise NotFoundError(f"there is no MCP server {name!r}")


def _answer(server: McpServer) -> Answer:
    return Answer.model_validate(describe_server(server))


_DECLARATION: Final = {"command": "mcp-server-time", "args": ["--local-timezone", "UTC"]}

_EXAMPLES: Final = Examples(
    parameters={
        "mcp name": "time",
    },
    models={
        "McpServer": {
            "name": "time",
            "plugin": "mcp.time",
            "status": "ok",
            "source": "database",
            "transport": "stdio",
            "declaration": _DECLARATION,
            "tools": ["get_current_time", "convert_time"],
            "server": "mcp-time 1.0.0",
            "protocol": "2025-11-25",
            "listed_at": BEGUN,
        },
        "McpServerBody": {"declaration": _DECLARATION},
        "McpTrial": {
            "name": "time",
            "plugin": "mcp.time",
            "error": None,
            "about": {"name": "mcp-time", "version": "1.0.0"},
            "confinement": None,
            "tools": [
                {
                    "name": "get_current_time",
                    "method": "mcp.time.get_current_time",
                    "signature": "(timezone: str) -> str",
                    "requires_approval": False,
                    "runs_once": False,
                }
            ],
        },
    },
)

route(router, "GET", "/mcp/servers", list_mcp_servers)
route(router, "PUT", "/mcp/servers/{name}", put_mcp_server)
route(router, "DELETE", "/mcp/servers/{name}", delete_mcp_server)
route(router, "POST", "/mcp/servers/{name}/test", test_mcp_server)

GATEWAY_PART: Final = GatewayPart(
    api=(router,), root=(endpoint.router,), build=endpoint.McpEndpoint, examples=_EXAMPLES
)
