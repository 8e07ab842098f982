"""`nekro mcp serve`: the SDK's own client over stdin and stdout, with the local system and over a gateway."""

from __future__ import annotations

import os
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
from worker_fleet import Fleet

from cli.environment import environment_of
from gateway.app import create_app
from gateway.identity import Scope

ARGUMENTS = ["-P", "-m", "cli.main", "mcp", "serve"]


@pytest.fixture(scope="module")
def database_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One kind of database: none of this depends on it."""
    return f"sqlite:///{tmp_path_factory.mktemp('db') / 'nekro.db'}"


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
    base = {**os.environ, "PYTHONPATH": os.getcwd()}
    if request.param == "local":
        yield base | environment_of(fleet.settings)
        return
    async with served(create_app(fleet.settings)) as client:
        yield base | {"NEKRO_URL": str(client.base_url), "NEKRO_KEY": key}


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
