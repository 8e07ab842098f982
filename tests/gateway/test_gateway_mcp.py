"""MCP servers over the API."""

from __future__ import annotations

import asyncio
import json

import httpx
from worker_fleet import Fleet


async def test_servers_are_declared_listed_and_removed(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    _, client = gateway
    declaration = {"command": "no-such-program", "env": {"API_KEY": "literal-secret"}}
    made = await client.put("/api/v1/mcp/servers/my-tools", json={"declaration": declaration})
    assert made.status_code == 200, made.text
    assert made.json()["plugin"] == "mcp.my_tools"
    listed = await client.get("/api/v1/mcp/servers")
    (server,) = listed.json()["items"]
    assert (server["name"], server["transport"], server["source"]) == ("my-tools", "stdio", "database")
    assert "literal-secret" not in listed.text + made.text
    audit = await client.get("/api/v1/audit")
    assert {act["action"] for act in audit.json()["items"]} >= {"mcp.declare"}
    assert "literal-secret" not in audit.text
    removed = await client.delete("/api/v1/mcp/servers/my-tools")
    assert removed.json()["name"] == "my-tools"
    assert (await client.get("/api/v1/mcp/servers")).json()["items"] == []


async def test_no_declaration_reads_secrets_of_the_fleet(gateway: tuple[Fleet, httpx.AsyncClient]) -> None:
    """Over the API, by the command and in the file of workers."""
    fleet, client = gateway
    data_dir = fleet.settings.data_dir
    for entry, fault in (
        (
            {"url": "https://x/${NEKRO_SECURITY__SIGNING_KEY}"},
            "variable NEKRO_SECURITY__SIGNING_KEY is not passed",
        ),
        (
            {"command": "cat", "nekro": {"files": {str(data_dir): "ro"}}},
            "is refused: it is the data directory",
        ),
    ):
        refused = await client.put("/api/v1/mcp/servers/x", json={"declaration": entry})
        assert refused.status_code == 422 and fault in refused.json()["detail"], refused.text
        added = await asyncio.to_thread(fleet.run, "mcp", "add", "x", "--declaration", json.dumps(entry))
        assert added.returncode != 0 and fault in added.stderr, added.stderr
        assert (await client.get("/api/v1/mcp/servers")).json()["items"] == []
        (data_dir / "mcp.json").write_text(json.dumps({"mcpServers": {"x": entry}}))
        (listed,) = (await client.get("/api/v1/mcp/servers")).json()["items"]
        assert (listed["status"], listed["declaration"]) == ("failed", {}) and fault in listed["error"]
        (data_dir / "mcp.json").unlink()


async def test_a_faulty_declaration_and_an_unknown_server_are_problems(
    gateway: tuple[Fleet, httpx.AsyncClient],
) -> None:
    _, client = gateway
    refused = await client.put(
        "/api/v1/mcp/servers/x", json={"declaration": {"command": "a", "url": "https://b"}}
    )
    assert refused.status_code == 422 and "either `command`" in refused.json()["detail"]
    for answer in (
        await client.delete("/api/v1/mcp/servers/none"),
        await client.post("/api/v1/mcp/servers/none/test"),
    ):
        assert answer.status_code == 404 and "no MCP server" in answer.json()["detail"]
