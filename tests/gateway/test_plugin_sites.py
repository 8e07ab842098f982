"""Where gateways look for the HTTP servers of plugins, and what they accept from them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from gateway_server import served
from redis_process import free_port
from stream_server import StreamServer
from worker_fleet import Fleet

from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, store_key
from nekro.plugins.entries import PluginEntry, WebhookEntry, digest_of
from storage.catalogue import NewWorker, Snapshot

KEY = "Ada.far"


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    return make_fleet(gateway={"plugin_http": ("*=open",), "plugin_seconds": 5.0})


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(fleet.settings)) as client:
        yield client


async def publish(fleet: Fleet, *sites: tuple[str, str]) -> None:
    """Publish workers that serve the plugin, each on a host at an address; no others are live."""
    webhook = WebhookEntry(endpoint="far", task=f"{KEY}.webhook:far", plugin_key=KEY)
    text = PluginEntry(key=KEY, serves_http=True, webhooks=(webhook,)).to_json()
    services = fleet.services()
    async with services.database.begin() as transaction:
        await transaction.connection.exec_driver_sql("UPDATE workers SET lease_until = NULL")
        for number, (host, address) in enumerate(sites):
            worker = NewWorker(id=f"{host}-{number}-{address}", name="w", lane="long", host=host, pid=1)
            await transaction.catalogue.enter(worker, lease_seconds=60)
            await transaction.catalogue.serve(
                worker.id, [Snapshot(digest=digest_of(text), plugin_key=KEY, entry=text)]
            )
            await transaction.catalogue.serve_sites(worker.id, {KEY: address})
        await transaction.catalogue.forget_gone()
    await services.database.dispose()


async def test_loopback_addresses_of_other_hosts_are_not_used(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    await publish(fleet, ("elsewhere", "127.0.0.1:1"))
    answer = await client.get(f"/plugins/{KEY}/")
    assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
    assert "elsewhere" in answer.json()["detail"]
    assert "NEKRO_WORKERS__HTTP_ADDRESS" in answer.json()["detail"]


async def test_the_answer_of_another_program_is_not_passed_on(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx-nekro-proof: 00\r\ncontent-length: 6\r\n\r\nsecret")
        await writer.drain()
        writer.close()

    async with StreamServer(answer) as server:
        await publish(fleet, (socket.gethostname(), f"127.0.0.1:{server.port}"))
        refused = await client.get(f"/plugins/{KEY}/")
    assert (refused.status_code, refused.json()["code"]) == (502, "plugin_failed")
    assert "secret" not in refused.text


async def test_a_worker_that_accepts_no_connection_is_passed_over(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    await publish(fleet, (socket.gethostname(), f"127.0.0.1:{free_port()}"))
    answer = await client.get(f"/plugins/{KEY}/")
    assert (answer.status_code, answer.json()["code"]) == (502, "plugin_failed")


async def test_a_plugin_that_needs_a_key_is_reached_with_the_scope_call_only(fresh_fleet: Fleet) -> None:
    values = {"plugin_http": (f"{KEY}=key",), "plugin_seconds": 0.1}
    settings = fresh_fleet.settings
    settings = settings.model_copy(update={"gateway": settings.gateway.model_copy(update=values)})
    await publish(fresh_fleet, ("elsewhere", "127.0.0.1:1"))
    services = fresh_fleet.services()
    keys = {}
    for scope in (Scope.CALL, Scope.READ):
        stored, keys[scope] = new_key(scope.value, scopes=(scope,))
        await store_key(services.database, stored, by=None, request_id=None)
    await services.database.dispose()
    async with served(create_app(settings), with_key=False) as client:
        for key, status in ((None, 401), ("nk_0_0", 401), (keys[Scope.READ], 403), (keys[Scope.CALL], 503)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            page = await client.get(f"/plugins/{KEY}/", headers=headers)
            assert page.status_code == status, page.text
            # An admitted webhook is sent; no worker takes it.
            called = await client.post("/api/webhook/far", headers=headers)
            assert called.status_code == (200 if status == 503 else status)
            token = {} if key is None else {"X-Webhook-Token": key}
            assert (await client.post("/api/webhook/far", headers=token)).status_code == called.status_code
            query = {} if key is None else {"webhook_token": key}
            assert (await client.post("/api/webhook/far", params=query)).status_code == called.status_code
        assert called.json()["data"]["errors"][0]["plugin_key"] == KEY
