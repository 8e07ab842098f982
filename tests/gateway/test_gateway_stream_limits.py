"""Open streams per key and per address, and what becomes of them when a gateway stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from gateway_server import served
from test_gateway_keys import key_of
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from nekro.gateway.access.limits import OpenStreams
from nekro.gateway.app import create_app
from nekro.operations.actor import RefusedError, Scope
from nekro.operations.keys import revoke_stored_key
from storage.engine import Database

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
EVENTS = "/api/v1/chats/site-1/events"
COMPLETION = {
    "model": "nekro",
    "messages": [{"role": "user", "content": "a"}],
    "stream": True,
    "user": "u",
}


@asynccontextmanager
async def gateway(fleet: Fleet, **limits: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    settings = fleet.settings.gateway.model_copy(update={"sse_access_key": None, **limits})
    app = create_app(fleet.settings.model_copy(update={"gateway": settings}))
    async with served(app, with_key=False) as client:
        await client.get("/healthz")  # answered when the services have started
        yield client, app.state


async def test_a_key_opens_so_many_streams_of_any_kind_and_others_are_served(fleet: Fleet) -> None:
    headers, other = [await key_of(fleet, Scope.READ, Scope.POST, Scope.RUN) for _ in range(2)]
    async with gateway(fleet, streams_per_key=2) as (client, state), AsyncExitStack() as open_ones:
        await open_ones.enter_async_context(client.stream("GET", EVENTS, headers=headers))
        second = client.stream("POST", "/v1/chat/completions", headers=headers, json=COMPLETION)
        answer = await open_ones.enter_async_context(second)
        assert answer.status_code == 200
        for method, path, body in (
            ("GET", EVENTS, None),
            ("POST", "/v1/chat/completions", COMPLETION),
            ("POST", "/v1/responses", {"model": "nekro", "input": "a", "stream": True}),
            ("POST", "/api/v1/runs", {"code": "1", "chat_key": "site-1"}),
        ):
            streamed = {**headers, "Accept": "text/event-stream"}
            refused = await client.request(method, path, headers=streamed, json=body)
            assert refused.status_code == 429 and "too_many_streams" in refused.text, refused.text
            assert int(refused.headers["retry-after"]) >= 1
        # Only streams count, and only those of the key.
        listed = await client.get("/v1/models", headers=headers)
        assert listed.status_code == 200
        async with client.stream("GET", EVENTS, headers=other) as own:
            assert own.status_code == 200
        await answer.aclose()

        async def has_room() -> bool:
            async with client.stream("GET", EVENTS, headers=headers) as again:
                return again.status_code == 200

        await eventually(has_room, what="the place of the closed stream")
    await eventually(lambda: not state.streams._keys, what="no stream is counted")


async def test_an_address_opens_so_many_streams_whatever_its_keys_are(fleet: Fleet) -> None:
    first, second = [await key_of(fleet, Scope.READ) for _ in range(2)]
    async with (
        gateway(fleet, streams_per_address=1, streams_per_key=0) as (client, state),
        client.stream("GET", EVENTS, headers=first) as one,
    ):
        assert one.status_code == 200
        refused = await client.get(EVENTS, headers=second)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
    await eventually(lambda: not state.streams._addresses, what="no stream is counted")


async def test_a_stream_with_a_ticket_counts_for_its_key(fleet: Fleet) -> None:
    headers, other = [await key_of(fleet, Scope.READ) for _ in range(2)]
    async with gateway(fleet, streams_per_key=1) as (client, state):
        paths = []
        for key in (headers, other):
            made = await client.post("/api/v1/stream-tickets", json={"chat_key": "site-1"}, headers=key)
            paths.append(made.json()["path"])

        async def status(path: str, **sent: str) -> int:
            async with client.stream("GET", path, headers=sent) as answer:
                return answer.status_code

        async with client.stream("GET", paths[0]) as one:
            assert one.status_code == 200
            assert await status(paths[0]) == await status(EVENTS, **headers) == 429
            assert await status(paths[1]) == 200
        await eventually(lambda: not state.streams._keys, what="no stream is counted")
        async with client.stream("GET", EVENTS, headers=headers) as one:
            assert one.status_code == 200
            assert await status(paths[0]) == 429


async def test_simultaneous_requests_do_not_pass_the_limit(fleet: Fleet) -> None:
    headers = await key_of(fleet, Scope.READ)

    async def status(client: httpx.AsyncClient, done: asyncio.Event) -> int:
        async with client.stream("GET", EVENTS, headers=headers) as answer:
            if answer.status_code == 200:
                await done.wait()
            return answer.status_code

    async with gateway(fleet, streams_per_key=3) as (client, _):
        done = asyncio.Event()
        asked = [asyncio.create_task(status(client, done)) for _ in range(20)]

        def refused() -> int:
            return sum(task.done() for task in asked)

        await eventually(lambda: refused() == 17, what="17 refusals")
        done.set()
        assert sorted(await asyncio.gather(*asked)) == [200] * 3 + [429] * 17


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", COMPLETION),
        ("/v1/responses", {"model": "nekro", "input": "a", "stream": True}),
    ],
)
async def test_the_stream_of_an_answer_ends_when_its_key_is_revoked(
    fleet: Fleet, path: str, body: dict[str, Any]
) -> None:
    headers, other = [await key_of(fleet, Scope.READ, Scope.POST) for _ in range(2)]
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    async with (
        gateway(fleet) as (client, state),
        client.stream("POST", path, headers=headers, json=body, timeout=WAIT_SECONDS) as ends,
        client.stream("POST", path, headers=other, json=body, timeout=WAIT_SECONDS) as stays,
    ):
        assert ends.status_code == stays.status_code == 200
        await revoke_stored_key(database, headers["Authorization"].split("_")[1], by=None, request_id=None)
        async for _ in ends.aiter_bytes():
            pass
        await eventually(lambda: len(state.streams._keys) == 1, what="one stream is left")
    await database.dispose()


def test_addresses_of_one_ipv6_network_count_together(fleet: Fleet) -> None:
    streams = OpenStreams(fleet.settings.gateway.model_copy(update={"streams_per_address": 1}))
    for first, second, is_one in (
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("192.0.2.1", "192.0.2.2", False),
    ):
        with streams.counted(key_id=None, host=first):
            if is_one:
                with pytest.raises(RefusedError), streams.counted(key_id=None, host=second):
                    pass
            else:
                with streams.counted(key_id=None, host=second):
                    pass
        with streams.counted(key_id=None, host=second):  # the first one is not counted any more
            pass
