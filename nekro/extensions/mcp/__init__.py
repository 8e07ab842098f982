"""The Model Context Protocol, in both directions.

``client`` connects workers to declared servers, whose tools become methods of plugins; ``server`` shows the
system to clients. The modules beside them import neither the protocol's SDK nor the sandbox, because commands
and workers without servers use them.
"""

from __future__ import annotations

from typing import Final

from nekro.app.extensions import Extension, ExtensionCommand

__all__ = ["EXTENSION"]

EXTENSION: Final = Extension(
    name="mcp",
    gateway="nekro.extensions.mcp.routes:GATEWAY_PART",
    worker="nekro.extensions.mcp.follower:McpPart",
    readers=("nekro.extensions.mcp.questions:ChatAnswers",),
    commands=(
        ExtensionCommand(
            name="mcp",
            summary="declare MCP servers, whose tools are methods; serve an MCP host",
            after="costs",
            module="nekro.extensions.mcp.commands",
        ),
    ),
    checks="nekro.extensions.mcp.commands:checks",
)
