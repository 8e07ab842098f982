"""Tries a server in the worker that uses it, for ``nekro mcp test``."""

from __future__ import annotations

from typing import Any

from broker_config.settings import Settings
from nekro.extensions.mcp.client.hub import SDK_MISSING, has_sdk
from nekro.extensions.mcp.client.masking import redactor_of
from nekro.extensions.mcp.client.plugins import build_plugin, needs_approval
from nekro.extensions.mcp.client.servers import McpServer, read_servers
from nekro.extensions.mcp.client.views import unused_reason
from nekro.extensions.mcp.worker.follower import McpServers
from nekro_agent.errors import InvalidValueError, MethodNotFoundError, NekroError, SandboxUnavailableError
from nekro_agent.execution.signatures import describe
from storage.engine import Database

__all__ = ["try_server", "untried"]


async def untried(settings: Settings, database: Database, plugin_key: str) -> dict[str, Any] | None:
    """Return the answer for a server that no worker uses; None if one may."""
    for server in await read_servers(settings, database):
        if server.plugin_key == plugin_key and (reason := unused_reason(server)) is not None:
            return _answer(server, reason)
    return None


async def try_server(servers: McpServers, plugin_key: str) -> dict[str, Any]:
    """Connect with the server of a plugin, list its tools, and say how it is confined; plain data.

    The declaration is the one that holds now. The answer has ``error``, which is None if the server works,
    ``about``, ``confinement`` (None for a server with a URL), ``tools`` and ``notes`` on faulty tools.

    Raises:
        MethodNotFoundError: no server that this process may use has the plugin, or it has lost it.
    """
    await servers.refresh()
    server = servers.server_of(plugin_key)
    if server is None or not servers.may_use(server):
        raise MethodNotFoundError(f"plugin {plugin_key!r} is not that of an MCP server of this worker")
    answer = _answer(server, server.error)
    if server.declaration is None:
        return answer
    if not has_sdk():
        return {**answer, "error": SDK_MISSING}
    from nekro.extensions.mcp.client.faults import ServerFault
    from nekro.extensions.mcp.client.tools import tools_text

    hide = redactor_of(server.declaration)
    try:
        opened, listing = await servers.hub.listing(server)
    except (ServerFault, InvalidValueError, SandboxUnavailableError, NekroError) as exc:
        return {**answer, "error": hide(str(exc))}
    from dataclasses import asdict, replace

    listed = replace(server, tools_text=tools_text(listing.tools), about=opened.session.about)
    plugin = build_plugin(listed, servers.hub)
    answer["error"] = None
    answer["about"] = opened.session.about
    answer["notes"] = listing.described_notes()
    if opened.confinement is not None:
        confinement = asdict(opened.confinement)
        answer["confinement"] = {**confinement, "files": list(confinement["files"])}
    answer["tools"] = [
        {
            "name": tool.name,
            "method": f"{plugin.key}.{method.func.__name__}",
            "signature": describe(method.func),
            "requires_approval": needs_approval(listed, tool),
            "runs_once": method.once,
        }
        for tool, method in zip(listed.tools, plugin.sandbox_methods, strict=True)
    ]
    return answer


def _answer(server: McpServer, error: str | None) -> dict[str, Any]:
    return {
        "name": server.name, "plugin": server.plugin_key, "error": error, "about": None,
        "confinement": None, "tools": [], "notes": [],
    }  # fmt: skip
