"""The MCP server over HTTP: the SDK's own client against gateways with real workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gateway_server import served
from key_ring import make_key
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError
from worker_fleet import Fleet

from gateway.app import create_app
from gateway.identity import Scope
from gateway.mcp.schemas import input_schema

CALL = (Scope.CALL, Scope.RUN, Scope.READ)


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
    return make_key(fleet.settings, *CALL, chats="group_1")


@pytest.fixture
async def gateway(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(fleet.settings)) as client:
        client.timeout = httpx.Timeout(60)
        yield client


@asynccontextmanager
async def connected(gateway: httpx.AsyncClient, key: str, mode: Any = "auto") -> AsyncIterator[Client]:
    url = str(gateway.base_url.join("/mcp"))
    async with (
        create_mcp_http_client(headers={"Authorization": f"Bearer {key}"}) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.mark.parametrize("mode", ["2026-07-28", "auto", "legacy"])
async def test_a_client_lists_calls_runs_and_reads(gateway: httpx.AsyncClient, key: str, mode: str) -> None:
    async with connected(gateway, key, mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"run_code", "find_methods", "wait_for_job", "Ada-mcp_tools-typed"} <= set(listed)
        assert "cancel_job" not in listed
        given = {"text": "ü", "number": 4, "many": ["a"]}
        done = await client.call_tool("Ada-mcp_tools-typed", given)
        assert not done.is_error and done.structured_content["result"]["many"] == ["a"]
        spread = await client.call_tool("spread", {"first": 1, "rest": [2, 3], "more": 4})
        assert spread.structured_content == {"result": [1, [2, 3], {"more": 4}]}
        failed = await client.call_tool("test_error_handling")
        assert failed.is_error and "intentionally" in failed.content[0].text
        advice = await client.call_tool("advise")
        assert advice.content[0].text == "look at group_1"
        picture = await client.call_tool("test_image_content")
        assert picture.content[0].type == "image"
        ran = await client.call_tool("run_code", {"code": "print(typed('x', number=2)['number'] + 1)"})
        assert not ran.is_error and ran.content[0].text.strip() == "3"
        await client.call_tool("picture")
        uris = [one.uri for one in (await client.list_resources()).resources]
        assert "nekro://chats/group_1/messages" in uris
        file = next(uri for uri in uris if uri.endswith(".png"))
        assert (await client.read_resource(file)).contents[0].blob
        prompt = await client.get_prompt("write_code", {"task": "add"})
        assert "typed(" in prompt.messages[0].content.text


async def test_unknown_things_and_things_of_other_chats_do_not_exist(
    gateway: httpx.AsyncClient, fleet: Fleet, key: str
) -> None:
    async with connected(gateway, key) as client:
        for uri in (
            "nekro://chats/group_2/messages",
            "nekro://chats/group_1/files/etc/passwd",
            "file:///etc",
        ):
            with pytest.raises(MCPError):
                await client.read_resource(uri)
        with pytest.raises(MCPError):
            await client.call_tool("nothing")
        with pytest.raises(MCPError):
            await client.get_prompt("nothing")


async def test_progress_is_reported(gateway: httpx.AsyncClient, key: str) -> None:
    told: list[float] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append(progress)

    async with connected(gateway, key) as client:
        await client.call_tool("test_tool_with_progress", progress_callback=on_progress)
    assert told == sorted(set(told))


async def test_forged_requests_are_refused(gateway: httpx.AsyncClient, key: str) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    sent = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
    for headers, status in (
        ({"Authorization": "Bearer nk_0"}, 401),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Mcp-Session-Id": "a" * 96}, 404),
        ({"X-Nekro-Chat": "group_2"}, 404),
    ):
        answer = await gateway.post("/mcp", json=body, headers={**sent, **headers})
        assert answer.status_code == status, (headers, answer.text)
    # Only the declared size is sent: the gateway answers before it reads a body.
    reader, writer = await asyncio.open_connection(gateway.base_url.host, gateway.base_url.port)
    head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {3 << 20}\r\n\r\n"
    writer.write(head.encode())
    assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert (await gateway.get("/mcp", headers=sent)).status_code == 405


async def test_a_request_to_one_gateway_the_next_to_another(
    gateway: httpx.AsyncClient, fleet: Fleet, key: str
) -> None:
    sent = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    begun = await gateway.post(
        "/mcp", json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}, headers=sent
    )
    sent |= {"Mcp-Session-Id": begun.headers["mcp-session-id"], "Mcp-Protocol-Version": "2025-11-25"}
    async with served(create_app(fleet.settings)) as other:
        params = {"name": "test_simple_text", "arguments": {}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        answer = await other.post("/mcp", json=request, headers=sent, timeout=60)
        assert answer.status_code == 200 and "simple text response" in answer.text
        # A request that this gateway serves is cancelled at the other one.
        params = {"name": "hold", "arguments": {"name": "c"}}
        request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        held = asyncio.create_task(gateway.post("/mcp", json=request, headers=sent, timeout=60))
        async with connected(gateway, key) as client:
            while (await client.call_tool("held", {"name": "c"})).structured_content["result"] != "began":
                await asyncio.sleep(0.05)
        note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}
        assert (await other.post("/mcp", json=note, headers=sent)).status_code == 202
        assert '"isError":true' in (await held).text.replace(" ", "")


def test_schemas_are_made_from_signatures(fleet: Fleet) -> None:
    services = fleet.services()

    async def read() -> dict[str, Any]:
        await services.start()
        try:
            return input_schema(await services.find_method("typed"))
        finally:
            await services.close()

    schema = asyncio.run(read())
    assert schema["required"] == ["text"] and schema["additionalProperties"] is False
    assert schema["properties"]["choice"] == {"enum": ["a", "b"], "default": "a"}
    assert schema["properties"]["many"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
