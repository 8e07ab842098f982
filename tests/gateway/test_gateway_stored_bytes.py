"""The quota of bytes that a key may keep stored: every way to store something, over a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from raw_http import raw, request_bytes
from test_gateway_keys import ALL, key_of
from test_mcp_server import connected
from worker_fleet import Fleet

from nekro.app.services import Services
from nekro.operations.actor import Scope
from nekro_agent.errors import StorageQuotaError
from nekro_agent.execution.current import on_account
from nekro_agent.ports import OutgoingMessage
from storage.states import account_of_key
from workers.sdk_runtime import SqlMessages

LIMIT = 200_000


async def limited(fleet: Fleet, *scopes: Scope, limit: int = LIMIT) -> dict[str, str]:
    return await key_of(fleet, *(scopes or ALL), stored_bytes_limit=limit)


def id_of(headers: dict[str, str]) -> str:
    return headers["Authorization"].split("_")[1]


async def stored(client: httpx.AsyncClient, headers: dict[str, str]) -> int:
    """Return what a key keeps stored, as the local key sees it."""
    listed = (await client.get("/api/v1/keys")).json()["items"]
    return next(int(one["stored_bytes"]) for one in listed if one["id"] == id_of(headers))


def is_refused(answer: httpx.Response) -> bool:
    """Whether the quota refused a request; any other error fails the test."""
    if answer.status_code in (201, 202):
        return False
    assert (answer.status_code, answer.json()["code"]) == (507, "storage_quota"), answer.text
    assert f"of {LIMIT} bytes stored" in answer.json()["detail"]
    return True


async def test_posts_at_once_through_many_chats_stay_within_the_quota(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    body = {"text": "x" * 20_000, "user_id": "ada"}

    async def post(number: int) -> httpx.Response:
        return await client.post(f"/api/v1/chats/many-{number}/messages", json=body, headers=headers)

    answers = await asyncio.gather(*(post(number) for number in range(12)))
    refused = [is_refused(answer) for answer in answers]
    assert 0 < refused.count(False) <= LIMIT // 40_000, refused
    assert await stored(client, headers) <= LIMIT
    for number, was_refused in enumerate(refused):
        history = await client.get(f"/api/v1/chats/many-{number}/messages")
        assert len(history.json().get("items", [])) == (0 if was_refused else 1)
    others = await limited(fleet)
    assert not is_refused(await client.post("/api/v1/chats/many-0/messages", json=body, headers=others))


async def test_uploads_at_once_stay_within_the_quota_and_removal_gives_back(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet)

    async def put(number: int) -> httpx.Response:
        url = f"/api/v1/chats/files-{number % 3}/files/f{number}.bin"
        return await client.put(url, content=bytes([number]) * 50_000, headers=headers)

    answers = await asyncio.gather(*(put(number) for number in range(8)))
    accepted = [answer for answer in answers if not is_refused(answer)]
    # Three chats are charged too, so three files fit and no fourth.
    assert 1 <= len(accepted) <= 3
    before = await stored(client, headers)
    assert before <= LIMIT
    first = accepted[0].json()
    again = await client.put(
        first["url"].rpartition("/")[0] + f"/{first['name']}",
        content=(await client.get(first["url"])).content,
        headers=headers,
    )
    if not is_refused(again):  # the same content has no effect
        assert again.json()["sha256"] == first["sha256"]
    assert await stored(client, headers) == before
    assert (await client.delete(first["url"], headers=headers)).status_code == 204
    assert await stored(client, headers) == before - 50_000 - 1024


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_body_without_room_is_refused_before_it_is_read(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    port = client.base_url.port
    assert port is not None
    sized = {**headers, "Content-Length": str(LIMIT + 1)}
    form = {**sized, "Content-Type": "multipart/form-data; boundary=b"}
    begun = [
        request_bytes(method, f"/api/v1/chats/c{path}", stated, b"the beginning")
        for method, path, stated in (
            ("PUT", "/files/big.bin", sized), ("POST", "/files", form), ("POST", "/messages", form)
        )
    ]  # fmt: skip
    # At once: the gateway keeps each connection for a while, so that its client reads the answer.
    for refused in await asyncio.gather(*(raw(port, request) for request in begun)):
        assert (refused.status, refused.code) == (507, "storage_quota")
    assert await stored(client, headers) == 0


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_pictures_and_forms_of_messages_count(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    files = {"file": ("a.bin", b"x" * 60_000)}
    url = "/api/v1/chats/c/messages"
    assert not is_refused(await client.post(url, data={"user_id": "a"}, files=files, headers=headers))
    assert await stored(client, headers) > 60_000
    part = {"type": "file", "data_url": "data:text/plain;base64," + "eHh4" * 60_000}
    assert is_refused(await client.post(url, json={"user_id": "a", "parts": [part]}, headers=headers))
    names = [file["name"] for file in (await client.get("/api/v1/chats/c/files")).json()["items"]]
    assert names == ["a.bin"]


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_key_without_room_is_told_by_every_surface(gateway: Any) -> None:
    fleet, client = gateway
    headers = await key_of(fleet, *ALL, stored_bytes_limit=100)
    said = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/chat/completions", {"model": "nekro", "messages": said}),
        ("/v1/responses", {"model": "nekro", "input": "hello"}),
    ):
        refused = await client.post(path, json=body, headers=headers)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (507, "storage_quota", "server_error")
        assert "of 100 bytes" in error["message"] and refused.headers["x-should-retry"] == "false"
    run = {"code": "print(1)", "chat_key": "c"}
    refused = await client.post("/api/v1/runs", json=run, headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (507, "storage_quota")
    async with connected(client, headers["Authorization"].removeprefix("Bearer ")) as host:
        refused = await host.call_tool("run_code", {"code": "print(1)"})
    assert refused.is_error and refused.content[0].text.startswith("storage_quota: the key ")
    declared = await client.put(
        "/api/v1/mcp/servers/x", json={"declaration": {"command": "true"}}, headers=headers
    )
    assert (declared.status_code, declared.json()["code"]) == (507, "storage_quota")
    assert (await client.get("/api/v1/mcp/servers")).json()["items"] == []


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_declaration_is_given_back_with_its_removal(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    declaration = {"command": "true", "env": {"A": "x" * 5000}}
    for _ in range(2):
        put = await client.put("/api/v1/mcp/servers/x", json={"declaration": declaration}, headers=headers)
        assert put.status_code == 200, put.text
        assert 6000 < await stored(client, headers) < 8000
    assert (await client.delete("/api/v1/mcp/servers/x")).status_code == 200
    assert await stored(client, headers) == 0


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_repeated_message_counts_once_and_a_refused_one_may_be_repeated(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    url = "/api/v1/chats/c/messages"
    body = {"text": "hi", "user_id": "a"}
    plain = await client.post(url, json=body, headers=headers)
    assert plain.status_code == 202
    before = await stored(client, headers)
    once = {**headers, "Idempotency-Key": "one"}
    for _ in range(2):  # the repetition stores nothing
        assert (await client.post(url, json=body, headers=once)).status_code == 202
    of_one = await stored(client, headers) - before
    assert 2 * 1024 < of_one < 2 * 1024 + 300  # message and event
    large = {"text": "x" * (LIMIT // 2), "user_id": "a"}
    assert not is_refused(await client.post(url, json={**large, "text": "y" * 60_000}, headers=headers))
    once = {**headers, "Idempotency-Key": "two"}
    assert is_refused(await client.post(url, json=large, headers=once))
    assert is_refused(await client.post(url, json=large, headers=once))


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_what_is_stored_is_shown_with_the_budgets(gateway: Any) -> None:
    fleet, client = gateway
    headers = await limited(fleet, Scope.POST)
    body = {"text": "hi", "user_id": "a"}
    assert (await client.post("/api/v1/chats/c/messages", json=body, headers=headers)).status_code == 202
    budgets = (await client.get("/api/v1/costs")).json()["budgets"]
    (shown,) = [one for one in budgets if one["measure"] == "stored_bytes"]
    assert (shown["scope"], shown["id"], shown["limit"]) == ("key", id_of(headers), LIMIT)
    assert shown["used"] == await stored(client, headers) > 0
    assert (shown["renews_at"], shown["period"], shown["state"]) == (None, "", "ok")


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_code_that_a_key_caused_sends_no_more_than_the_key_may_store(
    gateway: Any, services: Services
) -> None:
    fleet, client = gateway
    headers = await limited(fleet)
    await services.chat("c")
    messages = SqlMessages(services.database, services.publisher)
    async with services.database.begin() as transaction:
        await transaction.keys.add_turn(id_of(headers), "run")
    sent = 0
    with on_account("run"), pytest.raises(StorageQuotaError):
        while True:
            await messages.send(OutgoingMessage(chat_key="c", text="x" * 30_000))
            sent += 1
    assert sent == 3
    with on_account(account_of_key(id_of(headers))), pytest.raises(StorageQuotaError):
        await messages.push_system("c", "x" * 30_000, trigger_agent=False, call_id=None)
    await messages.send(OutgoingMessage(chat_key="c", text="x" * 30_000))  # of no key
    assert await stored(client, headers) <= LIMIT
