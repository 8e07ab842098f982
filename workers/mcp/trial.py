"""Tries a server in the worker that uses it, for ``nekro mcp test``."""

from __future__ import annotations

from typing import Any

from connectors.mcp.hub import SDK_MISSING, has_sdk
from connectors.mcp.masking import redactor_of
from connectors.mcp.plugins import build_plugin, needs_approval
from nekro_agent.errors import InvalidValueError, NekroError, NotFoundError, SandboxUnavailableError
from nekro_agent.execution.signatures import describe
from workers.mcp.follower import McpServers

__all__ = ["try_server"]


async def try_server(servers: McpServers, plugin_key: str) -> dict[str, Any]:
    """Connect with the server of a plugin, list its tools, and say how it is confined; plain data.

    The answer has ``error``, which is None if the server works, ``about``, ``confinement`` (None for a server
    with a URL) and ``tools``.

    Raises:
        NotFoundError: the plugin is not that of a server.
    """
    server = servers.server_of(plugin_key)
    if server is None:
        raise NotFoundError(f"plugin {plugin_key!r} is not that of an MCP server")
    answer: dict[str, Any] = {
        "name": server.name, "plugin": plugin_key, "error": server.error, "about": None,
        "confinement": None, "tools": [],
    }  # fmt: skip
    if server.declaration is None:
        return answer
    if not has_sdk():
        return {**answer, "error": SDK_MISSING}
    from connectors.mcp.session import ServerFault
    from connectors.mcp.tools import tools_text

    hide = redactor_of(server.declaration)
    try:
        opened = await servers.hub.listing(server)
        tools = await opened.session.tools()
    except (ServerFault, InvalidValueError, SandboxUnavailableError, NekroError) as exc:
        return {**answer, "error": hide(str(exc))}
    from dataclasses import asdict, replace

    text = tools_text(tools)
    await servers.listed(server, text, opened.session.about)
    listed = replace(server, tools_text=text, about=opened.session.about)
    plugin = build_plugin(listed, servers.hub)
    answer["error"] = None
    answer["about"] = opened.session.about
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
