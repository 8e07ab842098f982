"""Servers as listings show them: plain data, with literal secrets masked."""

from __future__ import annotations

from typing import Any

from nekro.extensions.mcp.client.declarations import Declaration
from nekro.extensions.mcp.client.masking import literal_secrets, shown
from nekro.extensions.mcp.client.servers import McpServer

__all__ = ["describe_server", "secret_warnings", "unused_reason"]


def describe_server(server: McpServer) -> dict[str, Any]:
    """Return a server for ``--json`` and for the API.

    ``status`` is ``disabled``, ``failed`` (with ``error``), ``new`` (not listed with this declaration yet) or
    ``ok``.
    """
    declaration, about = server.declaration, server.about or {}
    return {
        "name": server.name,
        "plugin": server.plugin_key,
        "status": _status(server),
        "source": server.source.value,
        "is_in_both": server.is_in_both,
        "transport": None if declaration is None else "stdio" if declaration.is_stdio else "http",
        "declaration": {} if declaration is None else shown(declaration),
        "tools": [tool.name for tool in server.tools],
        "notes": list(about.get("notes") or ()) if server.is_current else [],
        "server": " ".join(str(about[key]) for key in ("name", "version") if about.get(key)),
        "protocol": str(about.get("protocol") or ""),
        "error": server.error,
        "listed_at": None if server.listed_at is None else server.listed_at.isoformat(),
    }


def unused_reason(server: McpServer) -> str | None:
    """Return why no worker uses a server, so that none can test it; None if one may."""
    if server.declaration is None:
        return server.error
    return None if server.is_enabled else "it is disabled; enable it, then test it"


def secret_warnings(name: str, declaration: Declaration) -> list[str]:
    """Return one line for each literal of a declaration that looks like a secret."""
    return [
        f"{where} of {name} looks like a secret and is stored as it is; write ${{NAME}} instead, and "
        "set NAME in the environment of the workers"
        for where in literal_secrets(declaration)
    ]


def _status(server: McpServer) -> str:
    if not server.is_enabled:
        return "disabled"
    if server.error is not None:
        return "failed"
    return "ok" if server.is_current and server.tools_text is not None else "new"
