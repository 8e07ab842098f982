"""An MCP server over HTTP that writes its bytes by hand, on the loop of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

ECHO = {
    "name": "echo",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "annotations": {"readOnlyHint": True},
}
#: A tool with an effect, which must not happen twice.
ACT = {"name": "act", "inputSchema": {"type": "object", "properties": {}}}


@dataclass(kw_only=True)
class Reply:
    """One answer."""

    status: int = 200
    body: bytes | list[bytes] = b""
    kind: str | None = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    #: Waited for before the answer, and between the parts of a body.
    after: Awaitable[object] | None = None


#: Answers a message in a way of its own; None leaves it to the peer.
Behaviour = Callable[["RawPeer", dict[str, Any]], Reply | None]


def said(message: dict[str, Any], result: Any, **more: Any) -> dict[str, Any]:
    """The JSON-RPC answer with a result."""
    return {"jsonrpc": "2.0", "id": message.get("id"), "result": result, **more}


def reply(value: Any, **more: Any) -> Reply:
    return Reply(body=json.dumps(value).encode(), **more)


class RawPeer:
    """The server; ``sessions`` are those that it knows, ``ran`` the tools that it ran."""

    def __init__(self, behaviour: Behaviour | None = None) -> None:
        self.behaviour = behaviour
        self.sessions: set[str] = set()
        self.opened = 0
        self.received: list[str] = []
        self.ran: list[str] = []
        self.tools: list[Any] = [ECHO, ACT]
        #: How it answers a session that it does not know.
        self.lost = Reply(status=404, kind=None)
        self.session: str | None = None
        #: Those of the last request.
        self.headers: dict[str, str] = {}
        self.address = ""

    def answer(self, message: dict[str, Any]) -> Reply:
        """What a well-behaved server of 2025 answers."""
        method, params = message.get("method", ""), message.get("params") or {}
        if method == "initialize":
            self.opened += 1
            self.sessions.add(session := f"s{self.opened}")
            result = {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "raw", "version": "1"},
            }
            return reply(said(message, result), headers={"Mcp-Session-Id": session})
        if method == "tools/list":
            return reply(said(message, {"tools": self.tools}))
        if method == "tools/call":
            self.ran.append(params["name"])
            text = params.get("arguments", {}).get("text", "acted")
            return reply(said(message, {"content": [{"type": "text", "text": text}]}))
        if "id" not in message:
            return Reply(status=202, kind=None)
        return reply({
            "jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "Method not found"},
        })  # fmt: skip

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")
                headers = {
                    key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                verb = first.partition(" ")[0]
                found = self._reply(verb, headers, json.loads(body) if verb == "POST" else {})
                await self._write(writer, found)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _reply(self, verb: str, headers: dict[str, str], message: dict[str, Any]) -> Reply:
        self.session, self.headers = headers.get("mcp-session-id"), headers
        self.received.append(message.get("method", verb))
        if self.behaviour is not None and (own := self.behaviour(self, message | {"verb": verb})) is not None:
            return own
        if verb != "POST":
            return Reply(status=405, kind=None)
        is_opening = message.get("method") in ("initialize", "server/discover")
        if not is_opening and self.session not in self.sessions:
            return self.lost
        return self.answer(message)

    @staticmethod
    async def _write(writer: asyncio.StreamWriter, found: Reply) -> None:
        parts = found.body if isinstance(found.body, list) else [found.body]
        kind = {} if found.kind is None else {"Content-Type": found.kind}
        headers = {**kind, "Transfer-Encoding": "chunked", **found.headers}
        head = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        writer.write(f"HTTP/1.1 {found.status} Status\r\n{head}\r\n".encode())
        if found.after is not None:
            await writer.drain()
            await found.after
        for part in parts:
            if part:
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def raw_peer(
    behaviour: Behaviour | None = None, *, tools: list[Any] | None = None
) -> AsyncIterator[RawPeer]:
    """A peer that serves at ``peer.address``."""
    peer = RawPeer(behaviour)
    if tools is not None:
        peer.tools = tools
    server = await asyncio.start_server(peer.handle, "127.0.0.1", 0)
    peer.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    try:
        yield peer
    finally:
        server.close()
