"""Metrics of event streams, read from a gateway that serves them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from event_reader import frames
from gateway_server import served
from loguru import logger
from metric_values import figures_of
from waiting import eventually
from worker_fleet import Fleet

from nekro.app.chats.events import record
from nekro.app.services import Services
from nekro.gateway.app import create_app
from nekro.gateway.web import requests, responses, server
from storage.repositories.events import NewEvent

CHAT = "counted"
PATH = f"/api/v1/chats/{CHAT}/events"
ROUTE = "/api/v1/chats/{chat_key}/events"


def peers_of(server: tuple[str, int], client: tuple[str, int]) -> list[str]:
    """The kernel's entries of the server's end of a connection; empty when that is closed.

    Connections to other servers may have the same port at the client's end.
    """
    at = [address_of(*end) for end in (server, client)]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return [row[3] for row in rows if row[1:3] == at]


def address_of(host: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"


@contextmanager
def logged() -> Iterator[list[Any]]:
    """What is logged during the block."""
    lines: list[Any] = []
    sink = logger.add(lambda message: lines.append(message.record), level=0)  # type: ignore[attr-defined]
    try:
        yield lines
    finally:
        logger.remove(sink)


async def add(services: Services, count: int, *, chars: int = 1) -> None:
    async with services.database.begin() as tx:
        await tx.chats.ensure(CHAT)
        events = [NewEvent(type="call.ended", data={"text": "x" * chars}) for _ in range(count)]
        record(tx, services.publisher, CHAT, *events)


@pytest.mark.extended
@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_streams_are_counted_while_they_are_open_and_by_how_they_end(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(fresh_fleet.settings)
    async with served(app, http=server.protocol(30, connections=100)) as http:
        before = await figures_of(http)
        services: Services = app.state.services
        await add(services, 3)

        async def has_grown(**by: float) -> bool:
            now = await figures_of(http)
            names = {
                "open": ("nekro_streams_open",),
                "kept": ("nekro_stream_events_total", "kept"),
                **{end: ("nekro_stream_ends_total", end) for end in ("left", "slow", "stopped")},
            }
            return all(now.get(names[n], 0) - before.get(names[n], 0) == value for n, value in by.items())

        async with http.stream("GET", PATH, params={"after": 0}) as one, http.stream("GET", PATH):
            reading = frames(one)
            assert [(await anext(reading)).id for _ in range(3)] == [1, 2, 3]
            await eventually(lambda: has_grown(open=2, kept=3, left=0), what="the open streams")
        await eventually(lambda: has_grown(open=0, kept=3, left=2), what="their end")

        monkeypatch.setattr(responses, "SEND_SECONDS", 0.2)
        with (
            socket.create_connection((http.base_url.host, http.base_url.port or 80)) as silent,
            logged() as lines,
        ):
            ends = silent.getpeername(), silent.getsockname()
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            key = http.headers["Authorization"]
            head = f"GET {PATH}?types=call.ended HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {key}\r\n\r\n"
            silent.sendall(head.encode())
            await eventually(lambda: has_grown(open=1), what="the silent reader")
            assert peers_of(*ends)
            for _ in range(20):
                await add(services, 10, chars=100_000)
            await eventually(lambda: has_grown(open=0, slow=1, left=2), what="the end of the slow reader")
            # Nothing waits for the client any more: its connection is gone, whatever it takes.
            await eventually(lambda: not peers_of(*ends), what="the end of its connection")
        (ended,) = [line for line in lines if line["message"] != "request"]
        assert (ended["message"], ended["level"].name, ended["exception"]) == (
            "event_stream_ended",
            "INFO",
            None,
        )
        assert (
            ended["extra"]["reason"] == "its client took nothing for 0.2 s" and ended["extra"]["request_id"]
        )
        async with http.stream("GET", PATH):
            await eventually(lambda: has_grown(open=1), what="the last reader")
            app.state.hub.end()
            await eventually(lambda: has_grown(open=0, stopped=1), what="its end")


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_the_time_of_a_stream_is_that_to_its_beginning(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    now = [0.0]
    async with served(create_app(fresh_fleet.settings)) as http:
        await http.get("/healthz")
        before = await figures_of(http)
        monkeypatch.setattr(requests, "time", clock)
        async with http.stream("GET", PATH, params={"after": 0}) as stream:
            assert stream.status_code == 200
            now[0] = 1000.0

        async def grown(name: str) -> float:
            key = (name, ROUTE)
            return (await figures_of(http)).get(key, 0) - before.get(key, 0)

        async def has_ended() -> bool:
            return await grown("nekro_http_request_seconds_count") == 1

        await eventually(has_ended, what="the end of the stream")
        assert await grown("nekro_http_request_seconds_sum") == 0
