"""MCP servers: their declarations, and what workers know about them."""

from __future__ import annotations

import json
from typing import Final

from fastapi import APIRouter, Request, Response

from broker_config.secret_files import secret_paths
from nekro.app.services import Services
from nekro.extensions.mcp.declarations import parse
from nekro.extensions.mcp.rows import ServerRows
from nekro.extensions.mcp.server import endpoint
from nekro.extensions.mcp.servers import McpServer, describe_server, read_servers
from nekro.gateway.dependencies import IdentityDep, PathText, ServicesDep, record_act
from nekro.gateway.extensions import GatewayPart
from nekro.gateway.idempotency import OnceDep
from nekro.gateway.web.bodies import KeyedRoute
from nekro.operations.actor import Scope
from nekro_agent.errors import NotFoundError
from nekro_client.models import McpServer as Answer
from nekro_client.models import McpServerBody, McpTrial, Page
from storage.accounts.stored_bytes import ROW_BYTES, size_of
from storage.states import StoredKind

__all__ = ["GATEWAY_PART"]

router = APIRouter(route_class=KeyedRoute, tags=["mcp"])


@router.get("/mcp/servers")
async def list_mcp_servers(services: ServicesDep, identity: IdentityDep) -> Page[Answer]:
    """List the declared MCP servers, all on one page; literal secrets are masked."""
    identity.require_all(Scope.ADMIN)
    return Page(items=[_answer(server) for server in await _servers(services)])


@router.put("/mcp/servers/{name}")
async def put_mcp_server(
    name: PathText, body: McpServerBody, request: Request, services: ServicesDep, identity: IdentityDep
) -> Answer:
    """Declare an MCP server, or replace its declaration; workers have it within a second."""
    identity.require_all(Scope.ADMIN)
    declaration, is_enabled = parse(name, body.declaration, secrets=secret_paths(services.settings))
    async with services.database.begin() as transaction:
        await ServerRows(transaction.connection).put(
            name, json.loads(declaration.to_json()), is_enabled=is_enabled and body.is_enabled
        )
        # Without the declaration, which may contain secrets.
        await record_act(transaction.audit, request, identity, "mcp.declare", name)
        size = ROW_BYTES + size_of(declaration.to_json())
        await transaction.stored_bytes.hold(identity.key_id, _item(name), StoredKind.DECLARATIONS, size)
    return _answer(await _server(services, name))


@router.delete("/mcp/servers/{name}")
async def delete_mcp_server(
    name: PathText, request: Request, services: ServicesDep, identity: IdentityDep
) -> Answer:
    """Remove a server that the database declares; one of a worker's file is removed there."""
    identity.require_all(Scope.ADMIN)
    server = await _server(services, name)
    async with services.database.begin() as transaction:
        if not await ServerRows(transaction.connection).remove(name):
            raise NotFoundError(f"the database declares no MCP server {name!r}; a file of the workers does")
        await record_act(transaction.audit, request, identity, "mcp.remove", name)
        await transaction.stored_bytes.release(_item(name))
    return _answer(server)


@router.post("/mcp/servers/{name}/test", response_model=McpTrial)
async def test_mcp_server(
    name: PathText, services: ServicesDep, identity: IdentityDep, once: OnceDep
) -> Response:
    """Connect with a server on the worker that uses it; a server that does not work is an answer too."""
    identity.require_all(Scope.ADMIN)
    server = await _server(services, name)

    async def work() -> McpTrial:
        from nekro.extensions.mcp.follower import try_on_worker

        return McpTrial.model_validate(await try_on_worker(services, server.plugin_key))

    return await once.respond(work)


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


GATEWAY_PART: Final = GatewayPart(api=(router,), root=(endpoint.router,), build=endpoint.McpEndpoint)
