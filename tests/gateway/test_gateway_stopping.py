"""Requests that outlast the drain time of a gateway that stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gateway_process import GatewayProcess
from key_ring import make_key
from raw_http import RawAnswer, raw, request_bytes
from waiting import eventually
from worker_fleet import Fleet

from nekro.operations.actor import Scope
from nekro_client import AsyncClient, Client
from nekro_client.models import Call

HOLDING = """
import asyncio
from pathlib import Path

from nekro_agent.api.plugin import NekroPlugin, SandboxMethodType

plugin = NekroPlugin("holding", "holding", "Waits.", "1.0.0", "Ada", "")


@plugin.mount_sandbox_method(SandboxMethodType.BEHAVIOR, "hold")
async def hold(_ctx, directory: str) -> str:
    place = Path(directory)
    with (place / "began").open("a") as file:
        file.write("x")
    while not (place / "end").exists():
        await asyncio.sleep(0.02)
    return "held"
"""


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: none of this depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def holding(make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """A fleet with a method that waits, and gateways that wait a second for their requests."""
    plugins = tmp_path_factory.mktemp("plugins")
    (plugins / "holding.py").write_text(HOLDING)
    fleet = make_fleet(plugins={"dirs": (plugins,)}, gateway={"drain_seconds": 1})
    fleet.start("methods")
    return fleet


@pytest.fixture(scope="module")
def key(holding: Fleet) -> str:
    """A key that may call methods and read metrics."""
    return make_key(holding.settings, Scope.CALL, Scope.ADMIN)


async def test_a_request_that_is_cut_gets_a_problem_document(holding: Fleet, key: str) -> None:
    """Its body does not end, or the route does not."""
    with GatewayProcess(holding) as gateway:
        port = int(gateway.url.rpartition(":")[2])
        bearer = {"Authorization": f"Bearer {key}"}
        unfinished = request_bytes("POST", "/api/v1/calls", {**bearer, "Content-Length": "100"}, b"{")
        answers = [asyncio.create_task(raw(port, unfinished)) for _ in range(3)]

        async def are_taken() -> bool:
            found = await raw(port, request_bytes("GET", "/metrics", bearer))
            return b"nekro_http_requests_in_flight 4.0" in found.body

        await eventually(are_taken, what="the requests are being received")
        assert await asyncio.to_thread(gateway.stop) == 0
        for answer in await asyncio.gather(*answers):
            assert_cut(answer)
    log = gateway.log.read_text()
    assert log.count("request_cut") == 3
    assert "Traceback" not in log and "Exception in ASGI" not in log


def assert_cut(answer: RawAnswer) -> None:
    assert (answer.status, answer.code) == (503, "stopping")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "1" and answer.headers["connection"] == "close"
    problem = json.loads(answer.body)
    assert problem["request_id"] == answer.headers["x-request-id"] and "again" in problem["detail"]


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_client_repeats_a_request_that_was_cut(
    holding: Fleet, key: str, tmp_path: Path, is_async: bool
) -> None:
    gateway = GatewayProcess(holding)

    async def call() -> Call:
        method, args = "Ada.holding.hold", (str(tmp_path),)
        if is_async:
            async with AsyncClient(gateway.url, key, retry_seconds=170) as client:
                return await client.call(method, args, chat_key="web-1")
        with Client(gateway.url, key, retry_seconds=170) as plain:
            return await asyncio.to_thread(plain.call, method, args, chat_key="web-1")

    with gateway:
        calling = asyncio.create_task(call())
        await eventually((tmp_path / "began").exists, what="the method runs")
        assert await asyncio.to_thread(gateway.stop) == 0
        assert not calling.done() and "request_cut" in gateway.log.read_text()
        await asyncio.to_thread(gateway.__enter__)
        (tmp_path / "end").touch()
        assert (await calling).value == "held"
    assert (tmp_path / "began").read_text() == "x"
