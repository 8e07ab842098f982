"""`nekro gateway` as a process: readiness, probes, shutdown, refusal to listen without a key."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_process import GatewayProcess
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
def test_serves_probes_metrics_and_stops_gracefully(fresh_fleet: Fleet) -> None:
    with (
        GatewayProcess(fresh_fleet, "--port", "0") as gateway,
        httpx.Client(base_url=gateway.url, headers=gateway.headers, timeout=WAIT_SECONDS) as client,
    ):
        assert client.get("/readyz").json() == {"ok": True}
        assert client.post("/api/v1/chats/c/messages", json={"text": "x", "user_id": "u"}).status_code == 202
        text = client.get("/metrics").text
        wanted = (
            'nekro_http_requests_total{method="POST",'
            'route="/api/v1/chats/{chat_key}/messages",status="202"} 1.0'
        )
        assert wanted in text.split("\n")
        port = gateway.url.rpartition(":")[2]
        checked = fresh_fleet.run("gateway", "--check", "--port", port, "--json")
        assert (checked.returncode, json.loads(checked.stdout)) == (0, {"ok": True, "status": 200})
        assert gateway.stop() == 0
        assert fresh_fleet.run("gateway", "--check", "--port", port).returncode == 13


@pytest.mark.extended
@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_stopping_gateway_ends_its_streams_then_answers_requests(fresh_fleet: Fleet) -> None:
    completion = {"model": "nekro", "messages": [{"role": "user", "content": "a"}], "stream": True}
    ended: list[str] = []

    async def read(
        client: httpx.AsyncClient, name: str, begun: asyncio.Event, *request: Any, **more: Any
    ) -> None:
        async with client.stream(*request, **more) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_lines():
                begun.set()
        ended.append(name)

    with GatewayProcess(fresh_fleet) as gateway:
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=gateway.headers, timeout=WAIT_SECONDS
        ) as client:
            events, answers = asyncio.Event(), asyncio.Event()
            reading = [
                asyncio.create_task(read(client, "events", events, "GET", "/api/v1/chats/c/events?after=0")),
                asyncio.create_task(
                    read(client, "answer", answers, "POST", "/v1/chat/completions", json=completion)
                ),
            ]
            await asyncio.gather(events.wait(), answers.wait())
            # A request that is being received; its end comes when the streams have ended.
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = b'{"text": "last", "user_id": "u"}'
            head = (
                f"POST /api/v1/chats/c/messages HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
                f"Authorization: {gateway.headers['Authorization']}\r\n"
            )
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
            await eventually_taken(client)
            stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
            await asyncio.gather(*reading)
            writer.write(body)
            assert (await reader.readline()).startswith(b"HTTP/1.1 202 ")
            writer.close()
            assert await stopping == 0
    assert sorted(ended) == ["answer", "events"]


async def eventually_taken(client: httpx.AsyncClient) -> None:
    """Wait until the gateway has read the headers of the request whose body is still missing."""

    async def is_taken() -> bool:
        text = (await client.get("/metrics")).text
        # Both streams, the request, and the one that asks.
        return "nekro_http_requests_in_flight 4.0" in text.split("\n")

    await eventually(is_taken, what="the request is being received")


@pytest.mark.extended
@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
def test_listens_elsewhere_only_with_a_key(fresh_fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    for address in (("--host", "0.0.0.0", "--port", "0"), ("--socket", str(path))):
        refused = fresh_fleet.run("gateway", *address)
        assert refused.returncode == 2 and "no valid key" in refused.stderr
    key = fresh_fleet.run("keys", "create", "k", "--scope", "admin").stdout.strip()
    with GatewayProcess(fresh_fleet, "--socket", str(path)):
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x", timeout=WAIT_SECONDS
        ) as client:
            assert client.get("/api/v1/keys").status_code == 401
            headers = {"Authorization": f"Bearer {key}"}
            assert client.get("/api/v1/keys", headers=headers).status_code == 200


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
def test_says_that_its_port_is_taken(fresh_fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = fresh_fleet.run("gateway", "--port", str(taken.getsockname()[1]))
    assert refused.returncode == 13 and "--port" in refused.stderr
