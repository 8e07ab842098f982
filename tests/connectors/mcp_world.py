"""MCP servers of the tests and a hub that uses them without workers."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from broker_config.settings import Settings
from nekro.extensions.mcp.client.hub import Listings, ServerHub
from nekro.extensions.mcp.client.plugins import build_plugin
from nekro.extensions.mcp.server_requests import ServerRequests
from nekro.extensions.mcp.servers import McpServer, merged
from nekro_agent.plugin import NekroPlugin
from nekro_agent.schemas.agent_ctx import AgentCtx

ODD = Path(__file__).with_name("odd_server.py")


def odd_entry(mode: str = "", **own: Any) -> dict[str, Any]:
    """Declare the odd server."""
    python = str(Path("/usr/bin/python3") if Path("/usr/bin/python3").exists() else sys.executable)
    files = {str(ODD): "ro", **own.pop("files", {})}
    return {"command": python, "args": ["-u", str(ODD), mode], "nekro": {"files": files, **own}}


def server_of(entry: dict[str, Any], name: str = "odd") -> McpServer:
    """A declared server that was not listed yet."""
    (server,) = merged({name: entry}, [], secrets={})
    assert server.error is None, server.error
    return server


class Listed(Listings):
    """Keeps what servers reported, as the database does."""

    def __init__(self) -> None:
        self.tools: list[str] = []
        self.about: list[dict[str, Any]] = []
        self.errors: list[str] = []

    async def listed(self, server: McpServer, tools: str, about: dict[str, Any]) -> None:
        self.tools.append(tools)
        self.about.append(about)

    async def failed(self, server: McpServer, error: str) -> None:
        self.errors.append(error)


class World:
    """A hub, and calls of the methods of one server."""

    def __init__(
        self,
        settings: Settings,
        entry: dict[str, Any],
        name: str = "odd",
        requests: ServerRequests | None = None,
    ) -> None:
        self.listed = Listed()
        self.hub = ServerHub(settings, self.listed, requests)
        self.server = server_of(entry, name)
        self.progress: list[tuple[float, str]] = []

    @property
    def plugin(self) -> NekroPlugin:
        """The plugin of what the server listed last."""
        tools = self.listed.tools[-1] if self.listed.tools else None
        return build_plugin(dataclasses.replace(self.server, tools_text=tools), self.hub)

    def method(self, name: str) -> Callable[..., Any]:
        return next(m.func for m in self.plugin.sandbox_methods if m.func.__name__ == name)

    async def call(self, name: str, *args: Any, chat_key: str = "mcp", **kwargs: Any) -> Any:
        ctx = AgentCtx.for_call(
            chat_key=chat_key, call_id="0123456789", on_progress=lambda *seen: self.progress.append(seen)
        )
        return await self.method(name)(ctx, *args, **kwargs)


@asynccontextmanager
async def opened(
    settings: Settings,
    entry: dict[str, Any],
    name: str = "odd",
    requests: ServerRequests | None = None,
) -> AsyncIterator[World]:
    """A world whose server has listed its tools."""
    world = World(settings, entry, name, requests)
    try:
        await world.hub.listing(world.server)
        yield world
    finally:
        await world.hub.close()
