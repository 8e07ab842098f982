"""Routes of MCP servers, and the endpoint of the system's own server."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter

from nekro.extensions.mcp import operations
from nekro.extensions.mcp.server import endpoint
from nekro.gateway.document.examples import BEGUN, Examples
from nekro.gateway.extensions import GatewayPart
from nekro.gateway.operation_routes import route
from nekro.gateway.web.bodies import KeyedRoute

__all__ = ["GATEWAY_PART"]

router = APIRouter(route_class=KeyedRoute, tags=["mcp"])

_DECLARATION: Final = {"command": "mcp-server-time", "args": ["--local-timezone", "UTC"]}

_EXAMPLES: Final = Examples(
    parameters={
        "mcp name": "time",
        "question_id": "3f2a9c1b-5d2e",
    },
    models={
        "McpReply": {"call_id": "45c48cce2e2d4fbdba1fc6a4d2c1e0f7"},
        "McpReplyBody": {"action": "accept", "content": {"city": "Rome"}},
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

route(router, "GET", "/mcp/servers", operations.list_mcp_servers)
route(router, "PUT", "/mcp/servers/{name}", operations.put_mcp_server)
route(router, "DELETE", "/mcp/servers/{name}", operations.delete_mcp_server)
route(router, "POST", "/mcp/servers/{name}/test", operations.test_mcp_server)
route(router, "POST", "/mcp/questions/{question_id}/answer", operations.answer_mcp_question)

GATEWAY_PART: Final = GatewayPart(
    api=(router,), root=(endpoint.router,), build=endpoint.McpEndpoint, examples=_EXAMPLES
)
