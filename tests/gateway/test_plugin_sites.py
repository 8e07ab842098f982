"""Where gateways look for the HTTP servers of plugins, and what they accept from them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from gateway_server import served
from worker_fleet import Fleet

from gateway.app import create_app
from storage.publications import NewWorker, Snapshot
from workers.catalogue.entries import PluginEntry, digest_of

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
    text = PluginEntry(key=KEY, serves_http=True).to_json()
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

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await publish(fleet, (socket.gethostname(), f"127.0.0.1:{port}"))
    refused = await client.get(f"/plugins/{KEY}/")
    server.close()
    await server.wait_closed()
    assert (refused.status_code, refused.json()["code"]) == (502, "plugin_failed")
    assert "secret" not in refused.text


async def test_a_worker_that_accepts_no_connection_is_passed_over(
    fleet: Fleet, client: httpx.AsyncClient
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    here = socket.gethostname()
    await publish(fleet, (here, f"127.0.0.1:{free}"))
    answer = await client.get(f"/plugins/{KEY}/")
    assert (answer.status_code, answer.json()["code"]) == (502, "plugin_failed")
