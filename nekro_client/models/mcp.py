"""MCP servers and their tools."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from nekro_client.models.base import Answer, Body, PlainJson

__all__ = [
    "McpNote",
    "McpReply",
    "McpReplyBody",
    "McpServer",
    "McpServerBody",
    "McpTool",
    "McpTrial",
]


class McpNote(Answer):
    """What is wrong with a tool that an MCP server lists, or with its listing."""

    #: Name of the tool, or its place; None for the whole listing.
    tool: str | None = None
    reason: str
    #: Whether the tool cannot be called; else the rest of it is used.
    is_left_out: bool = False


class McpServer(Answer):
    """A declared server of the Model Context Protocol; it is the plugin ``plugin``."""

    name: str
    plugin: str
    #: ``ok``, ``failed``, ``new`` (not listed with this declaration yet) or ``disabled``.
    status: str
    #: ``file`` or ``database``.
    source: str
    #: Whether the database declares it too; the file wins.
    is_in_both: bool = False
    #: ``stdio`` or ``http``; None if the declaration is faulty.
    transport: str | None = None
    #: Literal secrets are masked.
    declaration: dict[str, JsonValue] = {}
    #: Names of the tools as they were listed last.
    tools: list[str] = []
    #: On tools that the server describes wrongly.
    notes: list[McpNote] = []
    #: Name and version that it states.
    server: str = ""
    protocol: str = ""
    error: str | None = None
    listed_at: datetime | None = None


class McpServerBody(Body):
    """The declaration of an MCP server."""

    #: As an entry of ``mcp.json``: ``{"command", "args", "env"}`` or ``{"url", "headers"}``, and ``nekro``.
    declaration: dict[str, PlainJson]
    is_enabled: bool = True


class McpReplyBody(Body):
    """A person's answer to a question of an MCP server."""

    action: Literal["accept", "decline"]
    #: Values by the names of the fields of the question; ``""`` names the only one.
    content: dict[str, PlainJson] | None = None


class McpReply(Answer):
    """An answer that was passed on."""

    #: The call that asks.
    call_id: str


class McpTool(Answer):
    """A tool of an MCP server as a method."""

    name: str
    method: str
    signature: str
    requires_approval: bool
    runs_once: bool


class McpTrial(Answer):
    """What a worker found when it connected with a server."""

    name: str
    plugin: str
    #: None if the server works.
    error: str | None
    about: dict[str, JsonValue] | None
    #: How its process is confined; None for a server with a URL.
    confinement: dict[str, JsonValue] | None
    tools: list[McpTool]
    #: On tools that the server describes wrongly.
    notes: list[McpNote] = []
