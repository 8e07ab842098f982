"""An MCP server of the fault harness: ``mark_server.py LOG``.

It writes one line before and one after the work of a tool, serves several calls at a time, and stops a call
that is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "seconds": {"type": "number"}},
    "required": ["name", "seconds"],
}
TOOLS = [
    {"name": "repeat", "inputSchema": SCHEMA, "annotations": {"idempotentHint": True}},
    {"name": "once", "inputSchema": SCHEMA},
]


class Server:
    """Speaks the handshake of 2025 on standard input and output."""

    def __init__(self, log: str) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._calls: dict[Any, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until standard input ends."""
        reader = asyncio.StreamReader(limit=1 << 24)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
        )
        while line := await reader.readline():
            message = json.loads(line)
            if message["method"] == "tools/call":
                task = asyncio.create_task(self._call(message["id"], **message["params"]["arguments"]))
                self._calls[message["id"]] = task
            elif message["method"] == "notifications/cancelled":
                task = self._calls.get(message["params"]["requestId"])
                if task is not None:
                    task.cancel()
            elif "id" in message:
                self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        results = {
            "initialize": {
                "protocolVersion": message.get("params", {}).get("protocolVersion"),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "marks", "version": "1"},
            },
            "tools/list": {"tools": TOOLS},
        }
        if message["method"] in results:
            self._send(message["id"], result=results[message["method"]])
        else:
            self._send(message["id"], error={"code": -32601, "message": "Method not found"})

    async def _call(self, request_id: Any, *, name: str, seconds: float) -> None:
        try:
            self._note("start", name)
            await asyncio.sleep(seconds)
            self._note("end", name)
            self._send(request_id, result={"content": [{"type": "text", "text": name}]})
        finally:
            self._calls.pop(request_id, None)

    def _note(self, event: str, name: str) -> None:
        line = {"event": event, "call_id": name, "name": name, "pid": os.getpid(), "at": time.time()}
        os.write(self._log, f"{json.dumps(line)}\n".encode())

    @staticmethod
    def _send(request_id: Any, **fields: Any) -> None:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request_id, **fields}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(Server(sys.argv[1]).run())
