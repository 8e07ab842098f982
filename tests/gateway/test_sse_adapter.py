"""Chats over Nekro Agent's SSE adapter protocol, with clients and gateways that come and go."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import pytest
from gateway_process import GatewayProcess
from gateway_server import served
from sse_client import ACCESS_KEY, PATH, SseClient
from waiting import WAIT_SECONDS
from worker_fleet import Fleet

from nekro.app import use_cases
from nekro.extensions.sse_adapter import stream
from nekro.extensions.sse_adapter.stream import WireEvent, message_events
from nekro.gateway.app import create_app
from nekro_agent.ports import OutgoingMessage
from storage.repositories.messages import Message
from storage.states import SendState
from workers.sdk_runtime import SqlMessages


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet]) -> Fleet:
    fleet = make_fleet(gateway={"sse_access_key": ACCESS_KEY})
    fleet.start("methods")
    return fleet


@asynccontextmanager
async def gateway(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(fleet.settings)) as http:
        http.timeout = httpx.Timeout(60)
        yield http


@asynccontextmanager
async def process(fleet: Fleet) -> AsyncIterator[tuple[GatewayProcess, httpx.AsyncClient]]:
    gateway = GatewayProcess(fleet)
    await asyncio.to_thread(gateway.__enter__)
    try:
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=gateway.headers, timeout=WAIT_SECONDS
        ) as http:
            yield gateway, http
    finally:
        await asyncio.to_thread(gateway.stop)


@pytest.fixture
async def http(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway(fleet) as http:
        yield http


@pytest.fixture
def channel() -> str:
    return f"group_{uuid4().hex[:8]}"


async def invoke(fleet: Fleet, channel: str, method: str, *calls: tuple[Any, ...]) -> None:
    services = fleet.services()
    await services.start()
    try:
        for arguments in calls:
            await use_cases.invoke(
                services, method, arguments, {}, chat_key=f"sse-{channel}", user_id=None, timeout_seconds=60.0
            )
    finally:
        await services.close()


async def say(fleet: Fleet, channel: str, *texts: str) -> None:
    await invoke(fleet, channel, "say", *((text,) for text in texts))


async def rows(fleet: Fleet, sql: str, *values: Any) -> list[Any]:
    services = fleet.services()
    async with services.database.read() as transaction:
        mark = "?" if transaction.connection.is_sqlite else "%s"
        found = list(await transaction.connection.exec_driver_sql(sql.replace("?", mark), values))
    await services.database.dispose()
    return found


async def test_messages_and_answers_pass_between_client_and_chat(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client = SseClient(http)
    await client.register()
    async with client.connected():
        await client.subscribe(channel)
        await client.post(
            channel,
            {"type": "at", "user_id": "bot", "nickname": "Bot"},
            {"type": "text", "content": "hello"},
            msg_id="1",
            is_to_me=True,
        )
        ((text, sender, adapter, name, kind),) = await rows(
            fleet,
            "SELECT m.text, m.sender_name, c.adapter_key, c.channel_name, c.channel_type FROM messages m"
            " JOIN chats c ON c.chat_key = m.chat_key WHERE m.chat_key = ?",
            f"sse-{channel}",
        )
        assert (text, sender, adapter, name, kind) == ("@Bot hello", "Uma", "sse", "The group", "group")
        assert await rows(fleet, "SELECT state FROM rounds WHERE chat_key = ?", f"sse-{channel}")
        await say(fleet, channel, "hi Uma")
        name, request = await client.next()
        assert name == "send_message"
        assert request["data"] == {
            "channel_id": channel,
            "channel_name": "The group",
            "segments": [{"type": "text", "content": "hi Uma"}],
        }
        assert await client.answer(request["request_id"], message_id="p1", success=True)
        assert not await client.answer(request["request_id"], message_id="p1", success=True)


async def test_texts_that_are_not_unicode_pass_in_both_directions(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client, half = SseClient(http), "half \ud83d of it"
    await client.register()
    async with client.connected():
        await client.subscribe(channel)
        await client.post(channel, {"type": "text", "content": half}, from_name=half)
        services = fleet.services()
        async with services.database.read() as transaction:
            (received,) = await transaction.messages.newest(f"sse-{channel}", limit=9)
        assert (received.text, received.sender_name) == (half, half)
        messages = SqlMessages(services.database, services.publisher)
        for text in (half, "whole"):
            await messages.send(OutgoingMessage(chat_key=f"sse-{channel}", text=text))
        await services.close()
        assert await client.next_texts(2) == [half, "whole"]


async def test_a_body_that_is_no_json_is_refused(http: httpx.AsyncClient) -> None:
    headers = {"X-Access-Key": ACCESS_KEY}
    for content in (b"{", b"\xff", b"[" * 100_000, b'{"cmd": "register", "platform": 1}'):
        refused = await http.post(PATH, content=content, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (400, "invalid_request"), content[:9]


async def test_one_message_that_cannot_be_written_does_not_delay_the_others(
    http: httpx.AsyncClient, fleet: Fleet, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events_of(message: Message, **options: Any) -> Iterator[WireEvent]:
        if message.text == "broken":
            raise ValueError("unexpected")
        return message_events(message, **options)

    monkeypatch.setattr(stream, "message_events", events_of)
    client = SseClient(http)
    await client.register()
    async with client.connected():
        # Of one channel the order is kept, so the other message is one of another channel.
        await client.subscribe(channel, f"{channel}-other")
        await say(fleet, channel, "broken")
        await say(fleet, f"{channel}-other", "whole")
        assert await client.next_texts(1) == ["whole"]


async def test_a_message_that_is_posted_again_is_recorded_once(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client = SseClient(http)
    await client.register()
    for _ in range(3):
        await client.post(channel, {"type": "text", "content": "once"}, msg_id="7", is_to_me=True)
    await client.post(channel, {"type": "text", "content": "mine"}, msg_id="8", is_self=True)
    found = await rows(
        fleet, "SELECT text FROM messages WHERE chat_key = ? ORDER BY sequence", f"sse-{channel}"
    )
    assert [row[0] for row in found] == ["once"]
    assert len(await rows(fleet, "SELECT id FROM rounds WHERE chat_key = ?", f"sse-{channel}")) == 1


@pytest.mark.extended
async def test_what_is_sent_waits_for_the_client_and_survives_gateways(fleet: Fleet, channel: str) -> None:
    texts = [f"text {number}" for number in range(15)]
    async with gateway(fleet) as http:
        client = SseClient(http)
        await client.register()
        await client.subscribe(channel)
        await say(fleet, channel, *texts)
        async with client.connected():
            assert await client.next_texts(3) == texts[:3]
            # The next one arrives and is not confirmed, because the connection breaks.
            _, unconfirmed = await client.next()
    async with gateway(fleet) as http:
        client.http, client.events = http, asyncio.Queue()
        async with client.connected():
            name, again = await client.next()
            assert (name, again) == ("send_message", unconfirmed)
            assert await client.answer(again["request_id"], success=True)
            assert await client.next_texts(11) == texts[4:]
    states = await rows(fleet, "SELECT DISTINCT state FROM adapter_sends WHERE channel_id = ?", channel)
    assert [row[0] for row in states] == [SendState.DONE]


async def test_any_gateway_takes_the_commands_of_a_client(fleet: Fleet, channel: str) -> None:
    async with gateway(fleet) as streaming, gateway(fleet) as other:
        client = SseClient(streaming)
        await client.register()
        async with client.connected():
            client.http = other
            await client.subscribe(channel)
            await say(fleet, channel, "a", "b")
            assert await client.next_texts(2) == ["a", "b"]


async def test_a_later_connection_ends_the_earlier_one(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client = SseClient(http)
    await client.register()
    await client.subscribe(channel)
    query = {"client_id": client.id, "access_key": ACCESS_KEY}
    async with http.stream("GET", PATH, params=query) as earlier:
        lines = earlier.aiter_lines()
        assert await anext(lines) == "event: connected"
        async with client.connected():
            await say(fleet, channel, "for the later one")
            assert await client.next_texts(1) == ["for the later one"]
            rest = [line async for line in lines]
    assert not any("send_message" in line for line in rest)


async def test_a_refused_message_is_tried_again_and_then_given_up(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client = SseClient(http)
    await client.register()
    async with client.connected():
        await client.subscribe(channel)
        await say(fleet, channel, "refused", "next")
        for number in range(3):
            _, request = await client.next()
            assert request["data"]["segments"][0]["content"] == "refused"
            # Clients report failures in either place.
            outcome = {"success": False} if number else {"success": True}
            body = {"cmd": "response", "request_id": request["request_id"], "data": {"success": False}}
            await client.command(**{**body, **outcome})
        assert await client.next_texts(1) == ["next"]
    ((state, error),) = await rows(
        fleet,
        "SELECT state, error FROM adapter_sends WHERE channel_id = ? AND attempt = 3",
        channel,
    )
    assert (state, '"success": false' in error) == (SendState.FAILED, True)


@pytest.mark.extended
@pytest.mark.parametrize("size", [5, 3_000_000])
async def test_files_are_sent_whole_or_in_parts(
    http: httpx.AsyncClient, fleet: Fleet, channel: str, size: int
) -> None:
    client = SseClient(http)
    await client.register()
    async with client.connected():
        await client.subscribe(channel)
        await invoke(fleet, channel, "show", ("a b.bin", size))
        name, request = await client.next()
        content = b""
        if name == "send_message":
            (segment,) = request["data"]["segments"]
            head, _, text = segment["base64_url"].partition(",")
            assert head == "data:application/octet-stream;base64"
            assert (segment["type"], segment["size"], segment["suffix"]) == ("file", size, ".bin")
            content = base64.b64decode(text)
        while name == "file_chunk":
            part = request["data"]
            is_last = part["chunk_index"] == part["total_chunks"] - 1
            assert bool(request["request_id"]) is is_last
            assert (part["total_size"], part["channel_id"]) == (size, channel)
            content += base64.b64decode(part["chunk_data"])
            last_id = request["request_id"]
            name, request = await client.next()
        assert content == bytes(index % 251 for index in range(size))
        if size > 5:
            assert (name, request["data"]["success"]) == ("file_chunk_complete", True)
            request["request_id"] = last_id
        assert await client.answer(request["request_id"], success=True)


async def test_a_file_may_have_two_thirds_of_a_message(fleet: Fleet, channel: str) -> None:
    limits = fleet.settings.gateway.model_copy(update={"media_bytes": 30_000})
    async with served(create_app(fleet.settings.model_copy(update={"gateway": limits}))) as http:
        client = SseClient(http)
        await client.register()
        headers = {"X-Access-Key": ACCESS_KEY, "X-Client-ID": client.id}

        async def post(size: int) -> httpx.Response:
            segment = {"type": "file", "base64_url": base64.b64encode(bytes(size)).decode(), "name": "n"}
            message = {"from_id": "u", "from_name": "U", "channel_id": channel, "segments": [segment]}
            body = {"cmd": "message", "channel_id": channel, "message": message}
            return await http.post(PATH, json=body, headers=headers)

        assert (await post(20_000)).status_code == 200
        for size, detail in ((20_001, "a file has more than 20000 bytes"), (30_000, "30000 bytes")):
            refused = await post(size)
            assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")
            assert detail in refused.json()["detail"]


async def test_files_of_people_are_stored_in_the_chat(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client = SseClient(http)
    await client.register()
    content = bytes(range(256)) * 40
    text = base64.b64encode(content).decode()
    await client.post(
        channel,
        {"type": "text", "content": "look"},
        {"type": "image", "base64_url": f"data:image/png;base64,{text}", "name": "../../p.png"},
        {"type": "file", "base64_url": text, "name": "n.bin", "size": 3, "unknown": 1},
    )
    services = fleet.services()
    folder = await asyncio.to_thread(services.areas.uploads_dir, f"sse-{channel}")
    assert sorted(path.name for path in folder.iterdir()) == ["n.bin", "p.png"]
    assert all(path.read_bytes() == content for path in folder.iterdir())
    await services.close()
    headers = {"X-Access-Key": ACCESS_KEY, "X-Client-ID": client.id}
    for segment, code in (
        ({"type": "image", "url": "http://127.0.0.1:1/a.png"}, "file_not_fetched"),
        ({"type": "image", "url": "http://169.254.169.254/latest"}, "file_not_fetched"),
        ({"type": "image", "url": "file:///etc/passwd"}, "file_not_fetched"),
        ({"type": "file", "base64_url": "data:x;base64,%%%"}, "invalid_request"),
        ({"type": "file"}, "invalid_request"),
        ({"type": "video", "url": "x"}, "invalid_request"),
    ):
        message = {"from_id": "u", "from_name": "U", "channel_id": channel, "segments": [segment]}
        body = {"cmd": "message", "channel_id": channel, "message": message}
        refused = await http.post(PATH, json=body, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (400, code), segment


async def test_wrong_keys_clients_and_commands_are_refused(http: httpx.AsyncClient, fleet: Fleet) -> None:
    for key in (None, "", "the-access-ke", "ü" * 10, "x" * 5000):
        headers = {"X-Access-Key": key.encode()} if key is not None else {}
        refused = await http.post(PATH, json={"cmd": "register"}, headers=headers)  # type: ignore[arg-type]
        assert refused.status_code == 401
        query = {"access_key": key} if key is not None else {}
        assert (await http.get(PATH, params=query)).status_code == 401
    headers = {"X-Access-Key": ACCESS_KEY, "X-Client-ID": "unknown"}
    for body, status in (
        ({"cmd": "subscribe", "channel_ids": ["a"]}, 404),
        ({"cmd": "reboot"}, 400),
        ({}, 400),
        ([], 400),
    ):
        assert (await http.post(PATH, json=body, headers=headers)).status_code == status
    assert (await http.post(PATH, content=b"{", headers=headers)).status_code == 400
    gateway_settings = fleet.settings.gateway.model_copy(update={"sse_access_key": None})
    settings = fleet.settings.model_copy(update={"gateway": gateway_settings})
    async with served(create_app(settings)) as closed:
        assert (await closed.get(PATH)).status_code == 404


@pytest.mark.slow
async def test_killed_gateways_lose_and_reorder_nothing(fleet: Fleet, channel: str) -> None:
    texts = [f"text {number}" for number in range(40)]
    confirmed: list[str] = []
    client = SseClient(httpx.AsyncClient(timeout=WAIT_SECONDS))
    async with process(fleet) as (_, client.http):
        await client.register()
        await client.subscribe(channel)
    await say(fleet, channel, *texts)
    for kill_after in (7, 13, len(texts)):
        async with process(fleet) as (gateway, client.http):
            client.events = asyncio.Queue()
            async with client.connected():
                while len(confirmed) < kill_after:
                    confirmed += await client.next_texts(1)
                if kill_after < len(texts):
                    _, lost = await client.next()  # arrives, and its gateway is killed
                    assert lost["data"]["segments"][0]["content"] == texts[kill_after]
                    await asyncio.to_thread(gateway.kill)
    assert confirmed == texts


@pytest.mark.slow
async def test_a_gateway_that_stops_ends_its_streams(fleet: Fleet, channel: str) -> None:
    async with process(fleet) as (gateway, http):
        client = SseClient(http)
        await client.register()
        await client.subscribe(channel)
        async with client.connected():
            await say(fleet, channel, "before")
            assert await client.next_texts(1) == ["before"]
            assert await asyncio.to_thread(gateway.stop) == 0
    rows_of_client = await rows(fleet, "SELECT lease_until FROM adapter_clients WHERE id = ?", client.id)
    assert rows_of_client[0][0] is None


async def test_a_client_is_asked_about_its_platform(
    http: httpx.AsyncClient, fleet: Fleet, channel: str
) -> None:
    client = SseClient(http)
    await client.register()
    path = "/api/v1/adapters/sse/requests"
    body = {"channel_id": channel, "request": "get_user_info", "data": {"user_id": "u1"}}
    assert (await http.post(path, json=body)).status_code == 404
    async with client.connected():
        await client.subscribe(channel)
        asked = asyncio.create_task(http.post(path, json=body))
        name, request = await client.next()
        assert (name, request["data"]) == ("get_user_info", {"user_id": "u1"})
        info = {"user_id": "u1", "user_name": "Uma", "platform_name": "wx"}
        assert await client.answer(request["request_id"], **info)
        assert (await asked).json() == {"data": info}
        headers = {"Idempotency-Key": channel}
        once = asyncio.create_task(http.post(path, json=body, headers=headers))
        _, request = await client.next()
        running = await http.post(path, json=body, headers=headers)
        assert (running.status_code, running.headers["retry-after"]) == (409, "1")
        assert await client.answer(request["request_id"], **info)
        assert (await once).json() == {"data": info}
        assert (await http.post(path, json=body, headers=headers)).json() == {"data": info}
        other = await http.post(path, json={**body, "data": {}}, headers=headers)
        assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
        late = await http.post(path, json={**body, "timeout_seconds": 0.5})
        assert (late.status_code, late.json()["code"]) == (504, "client_timeout")
        reboot = await http.post(path, json={**body, "request": "reboot"})
        assert reboot.status_code == 422
