"""The protocol's own conformance suite against `/mcp`; `make mcp-conformance` installs it.

The suite calls tools, resources and prompts by names that it prescribes. The tools are methods of the plugin
`mcp_tools`; for the rest a wrapper replaces the prescribed names with those that the system has.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from event_reader import frames
from fastapi import FastAPI
from gateway_server import served
from local_key import local_headers_of
from starlette.types import Message, Receive, Scope, Send
from worker_fleet import Fleet

from nekro.gateway.app import create_app

LOCK: Final = Path(__file__).parent / "mcp_conformance" / "package-lock.json"
CHAT: Final = "mcp-local"
#: What the suite prescribes, and what stands for it here.
NAMES: Final = {
    b"test://static-text": f"nekro://chats/{CHAT}/files/app/uploads/123.txt".encode(),
    b"test://static-binary": f"nekro://chats/{CHAT}/files/app/uploads/dot.png".encode(),
    b"test://template/123/data": f"nekro://chats/{CHAT}/files/app/uploads/123.txt".encode(),
    b"test_simple_prompt": b"write_code",
    b"test_prompt_with_arguments": b"write_code",
    b'"arg1":"testValue1","arg2":"testValue2"': b'"task":"testValue1 testValue2"',
}
#: Scenarios of what the server announces.
PASSED: Final = frozenset(
    {
        "server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-image",
        "tools-call-error", "tools-call-with-progress", "server-sse-multiple-streams", "resources-list",
        "resources-read-text", "resources-read-binary", "resources-templates-read", "prompts-list",
        "prompts-get-simple", "prompts-get-with-args", "dns-rebinding-protection",
    }
)  # fmt: skip
#: Scenarios of what it does not have, by the capability or the kind of content.
NOT_ANNOUNCED: Final = {
    "logging": ("logging-set-level", "tools-call-with-logging"),
    "completions": ("completion-complete",),
    "resources.subscribe": ("resources-subscribe", "resources-unsubscribe"),
    "requests to the client": (
        "tools-call-sampling", "tools-call-elicitation", "elicitation-sep1034-defaults",
        "elicitation-sep1330-enums",
    ),
    "content of methods besides texts and pictures": (
        "tools-call-audio", "tools-call-embedded-resource", "tools-call-mixed-content",
    ),
    "prompts with files": ("prompts-get-embedded-resource", "prompts-get-with-image"),
}  # fmt: skip


def suite() -> tuple[str, str]:
    """Node and the suite's program; skips the test where they are not installed."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    installed = Path(os.environ.get("NEKRO_MCP_CONFORMANCE") or Path(cache, "nekro-workers/mcp-conformance"))
    marker = installed / ".installed"
    if not marker.is_file() or marker.read_bytes() != LOCK.read_bytes():
        pytest.skip("the MCP conformance suite is not installed; `make mcp-conformance` does it (needs npm)")
    modules = installed / "node_modules"
    nodes = [str(path) for path in modules.glob("node-linux-*/bin/node")]
    return (nodes or ["node"])[0], str(modules / ".bin" / "conformance")


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: none of this depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    suite()
    fleet = make_fleet()
    fleet.start("methods")
    return fleet


@pytest.fixture
async def gateway(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway whose wrapper adds the local key, as the suite sends none."""
    app = create_app(fleet.settings)
    async with served(renamed(app)) as client:
        client.timeout = httpx.Timeout(60)
        yield client


def renamed(app: FastAPI) -> Any:
    """The application, which reads its own names in the requests of the suite."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def read() -> Message:
            message = await receive()
            if message["type"] == "http.request" and scope["path"] == "/mcp":
                for prescribed, own in NAMES.items():
                    message["body"] = message.get("body", b"").replace(prescribed, own)
            return message

        if scope["type"] == "http":
            key = local_headers_of(app)["Authorization"].encode()
            scope["headers"] = [*scope["headers"], (b"authorization", key)]
        if scope["type"] == "http" and scope["path"] == "/mcp":
            # The length of the body changes.
            scope["headers"] = [one for one in scope["headers"] if one[0] != b"content-length"]
        await app(scope, read, send)

    return serve


async def acknowledge(gateway: httpx.AsyncClient) -> None:
    """Let the method that reports progress go on when its report was published."""
    url = f"/api/v1/chats/{CHAT}/events"
    async with gateway.stream("GET", url, timeout=None) as response:
        async for frame in frames(response):
            if frame.event == "call.progress":
                body = {"method": "seen", "args": [frame.data["data"]["percent"]], "chat_key": CHAT}
                (await gateway.post("/api/v1/calls", json=body)).raise_for_status()


async def test_all_that_is_announced_passes(gateway: httpx.AsyncClient, tmp_path: Path) -> None:
    node, program = suite()
    for name, content in (("123.txt", b"text 123"), ("dot.png", b"\x89PNG\r\n\x1a\n\xff")):
        put = await gateway.put(f"/api/v1/chats/{CHAT}/files/{name}", content=content)
        put.raise_for_status()
    going_on = asyncio.create_task(acknowledge(gateway))
    command = (node, program, "server", "--url", f"{gateway.base_url}/mcp", "-o", str(tmp_path))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    going_on.cancel()
    results = {
        path.parent.name.removeprefix("server-").rsplit("-", 6)[0]: json.loads(path.read_text())
        for path in tmp_path.glob("*/checks.json")
    }
    failed = {
        name: [check.get("errorMessage") for check in checks if check["status"] == "FAILURE"]
        for name, checks in results.items()
    }
    left_out = {name for names in NOT_ANNOUNCED.values() for name in names}
    assert set(results) == PASSED | left_out, output.decode()
    assert {name: texts for name, texts in failed.items() if texts and name in PASSED} == {}
    assert {name for name, texts in failed.items() if texts} == left_out
