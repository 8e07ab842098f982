"""`nekro mcp serve`: the SDK's own client over stdin and stdout, with the local system and over a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_server import served
from key_ring import make_key
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.shared.exceptions import MCPError
from redis_process import free_port
from worker_fleet import Fleet

from nekro.cli.environment import environment_of
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope

pytestmark = pytest.mark.extended

ARGUMENTS = ["-P", "-m", "nekro.cli.main", "mcp", "serve"]
BASE = {**os.environ, "PYTHONPATH": os.getcwd()}


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: none of this depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    script = tmp_path_factory.mktemp("model") / "script.yaml"
    script.write_text("- when: '.*'\n  answer: ''\n")
    fleet = make_fleet(llm={"script": script})
    fleet.start("methods")
    fleet.start("rounds", concurrency=1)
    return fleet


@pytest.fixture(scope="module")
def key(fleet: Fleet) -> str:
    return make_key(fleet.settings, Scope.CALL, Scope.RUN, Scope.READ, chats="group_1")


@pytest.fixture(params=["local", "relay"])
async def environment(
    request: pytest.FixtureRequest, fleet: Fleet, key: str
) -> AsyncIterator[dict[str, str]]:
    """Environment of a host: with the fleet's settings, or with the address of a gateway."""
    if request.param == "local":
        yield BASE | environment_of(fleet.settings)
        return
    async with served(create_app(fleet.settings)) as client:
        yield BASE | {"NEKRO_URL": str(client.base_url), "NEKRO_KEY": key}


@asynccontextmanager
async def connected(environment: dict[str, str], mode: Any = "auto") -> AsyncIterator[Client]:
    arguments = [*ARGUMENTS, "--chat-key", "group_1"]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=environment)
    async with Client(stdio_client(parameters), mode=mode) as client:
        yield client


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
async def test_a_host_lists_calls_runs_and_reads(environment: dict[str, str], mode: str) -> None:
    async with connected(environment, mode) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"run_code", "Ada-mcp_tools-typed"} <= names
        done = await client.call_tool("typed", {"text": "ü\n2", "number": 4})
        assert not done.is_error and done.structured_content["result"]["text"] == "ü\n2"
        ran = await client.call_tool("run_code", {"code": "print(typed('x', number=2)['number'] + 1)"})
        assert not ran.is_error and ran.content[0].text.strip() == "3", ran
        uris = [one.uri for one in (await client.list_resources()).resources]
        assert "nekro://chats/group_1/messages" in uris
        assert "typed(" in (await client.get_prompt("write_code")).messages[0].content.text
        with pytest.raises(MCPError, match="no tool 'nothing'"):
            await client.call_tool("nothing")


@asynccontextmanager
async def started(environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(sys.executable, *ARGUMENTS, env=environment, **pipes)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def exchange(process: asyncio.subprocess.Process, line: bytes) -> dict[str, Any]:
    """Send a line and read the next one, which must be a message."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + b"\n")
    await process.stdin.drain()
    message: dict[str, Any] = json.loads(await process.stdout.readline())
    assert message["jsonrpc"] == "2.0"
    return message


async def test_lines_that_are_no_messages_are_answered_and_sigterm_ends_it(fleet: Fleet) -> None:
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    begin = {"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": hello}
    async with started(BASE | environment_of(fleet.settings)) as process:
        for line in (b"hello", b"\xff\xfe", b"[" * 100_000):
            answer = await exchange(process, line)
            assert answer["id"] is None and answer["error"]["code"] == -32700
            assert "a line of stdin is no JSON" in answer["error"]["message"]
        answer = await exchange(process, json.dumps(begin).encode())
        assert answer["id"] == 7 and answer["result"]["protocolVersion"] == "2025-11-25"
        process.terminate()
        rest, _ = await process.communicate()
        assert (rest, process.returncode) == (b"", 128 + signal.SIGTERM)


async def test_a_relay_says_why_the_gateway_refuses_or_does_not_answer(fleet: Fleet, key: str) -> None:
    assert key  # with a key in the database, a gateway requires one
    ping = json.dumps({"jsonrpc": "2.0", "id": "a", "method": "ping"}).encode()
    unused = f"http://127.0.0.1:{free_port()}"
    async with served(create_app(fleet.settings)) as client:
        for url, text in ((str(client.base_url), "key_invalid"), (unused, f"{unused}/mcp does not answer")):
            async with started(BASE | {"NEKRO_URL": url, "NEKRO_KEY": "nk_0"}) as process:
                answer = await exchange(process, ping)
                assert answer["id"] == "a" and text in answer["error"]["message"], answer
                assert process.stdin is not None
                process.stdin.close()
                assert await process.wait() == 0
