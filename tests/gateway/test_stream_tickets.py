"""Stream tickets: what they give, when they end, and that no log has them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import httpx
import pytest
from event_reader import frames
from gateway_server import served
from local_key import local_headers
from loguru import logger
from worker_fleet import Fleet

from broker_config.secret_files import secret_path
from nekro.app.chats.events import record
from nekro.app.services import Services
from nekro.gateway.access import signed_texts
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, revoke_stored_key, store_key
from nekro_agent.shared_clock import shared_time
from storage.repositories.events import NewEvent

CHAT = "group_1/ü x"


@pytest.fixture
async def services(services: Services) -> Services:
    async with services.database.begin() as tx:
        await tx.chats.ensure(CHAT)
        record(tx, services.publisher, CHAT, *(NewEvent(type="call.ended") for _ in range(3)))
    return services


async def make_key(services: Services, *scopes: Scope, **limits: Any) -> tuple[str, dict[str, str]]:
    """Store a key; returns its id and the header with it."""
    new, key = new_key("test", scopes=scopes or (Scope.READ,), **limits)
    await store_key(services.database, new, by=None, request_id=None)
    return new.id, {"Authorization": f"Bearer {key}"}


async def make_ticket(http: httpx.AsyncClient, headers: dict[str, str], chat_key: str = CHAT) -> str:
    """Return the path of a stream with its ticket."""
    answer = await http.post("/api/v1/stream-tickets", json={"chat_key": chat_key}, headers=headers)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    path = str(answer.json()["path"])
    assert answer.json()["ticket"] in path
    return path


async def status_of(http: httpx.AsyncClient, path: str, **headers: str) -> int:
    async with http.stream("GET", path, headers=headers) as response:
        return response.status_code


async def read(http: httpx.AsyncClient, path: str, count: int, **headers: str) -> list[int | None]:
    """Return the numbers of the next events."""
    async with http.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        found = []
        async for frame in frames(response):
            found.append(frame.id)
            if len(found) == count:
                break
    return found


async def test_a_ticket_reads_the_stream_of_its_chat_on_any_gateway_and_again(
    fresh_fleet: Fleet, services: Services
) -> None:
    _, key = await make_key(services)
    async with (
        served(create_app(fresh_fleet.settings), with_key=False) as one,
        served(create_app(fresh_fleet.settings), with_key=False) as two,
    ):
        path = await make_ticket(one, key)
        assert await read(one, f"{path}&after=0", 3) == [1, 2, 3]
        # As a browser connects again: to the same URL, with its last id, perhaps to another gateway.
        assert await read(two, f"{path}&after=0", 2, **{"Last-Event-ID": "1"}) == [2, 3]
        filtered = f"{path}&after=2&types=call.ended&live=false"
        assert await read(two, filtered, 1) == [3]


async def test_a_ticket_gives_nothing_else(fresh_fleet: Fleet, services: Services) -> None:
    _, key = await make_key(services, *Scope)
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        path = await make_ticket(http, key)
        ticket = path.partition("ticket=")[2]
        begin = f"/api/v1/chats/{CHAT.replace('/', '%2F')}"
        for other in (
            f"/api/v1/chats/group_2/events?ticket={ticket}",
            f"{begin}/messages?ticket={ticket}",
            f"{begin}/events/?ticket={ticket}",
            f"/api/v1/methods?ticket={ticket}",
            f"{path}&ticket={ticket}",
            f"{path}0",
            path.replace("ticket=nt_", "ticket=nk_"),
            path.replace(f"ticket={ticket}", "ticket="),
        ):
            assert await status_of(http, other) in (401, 404), other
        posted = await http.post(f"{begin}/messages?ticket={ticket}", json={"text": "x"})
        assert posted.status_code == 401
        another = await http.post(f"/api/v1/stream-tickets?ticket={ticket}", json={"chat_key": CHAT})
        assert another.status_code == 401
        # A ticket for a longer time would need another signature.
        head, end, signature = ticket.rsplit("_", 2)
        assert await status_of(http, path.replace(ticket, f"{head}_{int(end) + 1}_{signature}")) == 401
        assert await status_of(http, path) == 200


async def test_a_ticket_ends_with_its_time_and_with_its_key(
    fresh_fleet: Fleet, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_id, key = await make_key(services)
    _, short = await make_key(services, expires_at=shared_time() + timedelta(hours=1))
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        path, of_short = await make_ticket(http, key), await make_ticket(http, short)
        assert await status_of(http, path) == await status_of(http, of_short) == 200
        with monkeypatch.context() as patch:
            patch.setattr(signed_texts, "TICKET_SECONDS", -1)
            assert await status_of(http, await make_ticket(http, key)) == 401
        await revoke_stored_key(services.database, key_id, by=None, request_id=None)
        async with services.database.begin() as tx:
            await tx.connection.exec_driver_sql(
                "UPDATE api_keys SET expires_at = '2020-01-01 00:00:00.000000' WHERE expires_at IS NOT NULL"
            )
        assert await status_of(http, path) == await status_of(http, of_short) == 401


async def test_a_key_gives_tickets_for_what_it_may_read_only(fresh_fleet: Fleet, services: Services) -> None:
    _, poster = await make_key(services, Scope.POST)
    _, of_other = await make_key(services, chats="group_2*")
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        for headers, body, status in (
            (poster, {"chat_key": CHAT}, 403),
            (of_other, {"chat_key": CHAT}, 404),
            (of_other, {"chat_key": ""}, 422),
            ({}, {"chat_key": CHAT}, 401),
        ):
            answer = await http.post("/api/v1/stream-tickets", json=body, headers=headers)
            assert answer.status_code == status, answer.text
        strange = await http.post(
            "/api/v1/stream-tickets",
            content=b'{"chat_key": "group_2\\ud800"}',
            headers={**of_other, "Content-Type": "application/json"},
        )
        assert strange.status_code == 422, strange.text


async def test_a_ticket_of_the_local_key_ends_with_it(fresh_fleet: Fleet, services: Services) -> None:
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        path = await make_ticket(http, local_headers(services.settings.data_dir))
        assert await read(http, f"{path}&after=2", 1) == [3]
        secret_path(services.settings.data_dir, "api.key").unlink()
    async with served(create_app(fresh_fleet.settings), with_key=False) as http:
        assert await status_of(http, path) == 401


async def test_a_page_of_another_site_reads_with_a_ticket_only(
    fresh_fleet: Fleet, services: Services
) -> None:
    gateway = fresh_fleet.settings.gateway.model_copy(update={"cors_origins": ("https://shop.example",)})
    settings = fresh_fleet.settings.model_copy(update={"gateway": gateway})
    site = {"Origin": "https://shop.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
    foreign = {**site, "Origin": "https://evil.example"}
    _, key = await make_key(services)
    async with served(create_app(settings), with_key=False) as http:
        path = await make_ticket(http, key)
        async with http.stream("GET", path, headers=site) as response:
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://shop.example"
        async with http.stream("GET", path, headers=foreign) as response:
            # The page has the secret; its browser still does not show it the answer.
            assert "access-control-allow-origin" not in response.headers
        assert await status_of(http, path.partition("?")[0], **foreign) == 403
        assert await status_of(http, path.replace("ticket=nt_", "ticket=x"), **foreign) == 401


async def test_no_log_and_no_answer_has_a_ticket(fresh_fleet: Fleet, services: Services) -> None:
    _, key = await make_key(services)
    lines: list[str] = []
    sink = logger.add(lambda record: lines.append(f"{record} {record.record}"), level=0)  # type: ignore[attr-defined]
    try:
        async with served(create_app(fresh_fleet.settings), with_key=False) as http:
            path = await make_ticket(http, key)
            ticket = path.partition("ticket=")[2]
            assert await read(http, f"{path}&after=0", 1) == [1]
            answers = [
                await http.get(f"{path}x"),
                await http.get(f"{path}&after=x"),
                await http.get(path.replace("events", "messages")),
                await http.get(f"/nothing?ticket={ticket}"),
            ]
    finally:
        logger.remove(sink)
    assert [answer.status_code for answer in answers] == [401, 422, 401, 404]
    assert any("/chats/{chat_key}/events" in line for line in lines)
    assert not [text for text in (*lines, *(answer.text for answer in answers)) if ticket in text]
