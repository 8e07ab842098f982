"""The MCP server over HTTP: the SDK's own client against gateways with real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_server import served
from key_ring import make_key
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPError
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from nekro.extensions.mcp.server.methods import input_schema
from nekro.gateway.app import create_app
from nekro.operations.actor import Scope
from nekro.operations.keys import revoke_stored_key
from storage.engine import Database
from storage.repositories.events import NewEvent

PLUGINS = Path(__file__).parent / "plugins"
TILL = Path(__file__).parent.parent / "rounds" / "approval_plugins"
CALL = (Scope.CALL, Scope.RUN, Scope.READ)


@pytest.fixture(scope="module")
def database_url(sqlite_url: str) -> str:
    """One kind of database: none of this depends on it."""
    return sqlite_url


@pytest.fixture(scope="module")
def fleet(make_fleet: Callable[..., Fleet], tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    script = tmp_path_factory.mktemp("model") / "script.yaml"
    script.write_text("- when: '.*'\n  answer: ''\n")
    fleet = make_fleet(llm={"script": script}, plugins={"dirs": (PLUGINS, TILL)})
    fleet.start("methods")
    fleet.start("rounds", concurrency=1)
    return fleet


@pytest.fixture(scope="module")
def key(fleet: Fleet) -> str:
    return make_key(fleet.settings, *CALL, chats="group_1")


@pytest.fixture
async def gateway(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with served(create_app(fleet.settings)) as client:
        client.timeout = httpx.Timeout(60)
        yield client


@asynccontextmanager
async def connected(gateway: httpx.AsyncClient, key: str, mode: Any = "auto") -> AsyncIterator[Client]:
    url = str(gateway.base_url.join("/mcp"))
    async with (
        create_mcp_http_client(headers={"Authorization": f"Bearer {key}"}) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


@pytest.mark.parametrize("mode", ["2026-07-28", "auto", "legacy"])
async def test_a_client_lists_calls_runs_and_reads(gateway: httpx.AsyncClient, key: str, mode: str) -> None:
    async with connected(gateway, key, mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"run_code", "find_methods", "wait_for_job", "Ada-mcp_tools-typed"} <= set(listed)
        assert "cancel_job" not in listed
        assert "- typed: Return what it was given" in listed["run_code"].description
        given = {"text": "ü", "number": 4, "many": ["a"]}
        done = await client.call_tool("Ada-mcp_tools-typed", given)
        assert not done.is_error and done.structured_content["result"]["many"] == ["a"]
        spread = await client.call_tool("spread", {"first": 1, "rest": [2, 3], "more": 4})
        assert spread.structured_content == {"result": [1, [2, 3], {"more": 4}]}
        failed = await client.call_tool("test_error_handling")
        assert failed.is_error and "intentionally" in failed.content[0].text
        advice = await client.call_tool("advise")
        assert advice.content[0].text == "look at group_1"
        picture = await client.call_tool("test_image_content")
        assert picture.content[0].type == "image"
        ran = await client.call_tool("run_code", {"code": "print(typed('x', number=2)['number'] + 1)"})
        assert not ran.is_error and ran.content[0].text.strip() == "3"
        await client.call_tool("picture")
        uris = [one.uri for one in (await client.list_resources()).resources]
        assert "nekro://chats/group_1/messages" in uris
        file = next(uri for uri in uris if uri.endswith(".png"))
        assert (await client.read_resource(file)).contents[0].blob
        prompt = await client.get_prompt("write_code", {"task": "add"})
        assert "typed(" in prompt.messages[0].content.text


async def test_unknown_things_and_things_of_other_chats_do_not_exist(
    gateway: httpx.AsyncClient, fleet: Fleet, key: str
) -> None:
    async with connected(gateway, key) as client:
        for uri in (
            "nekro://chats/group_2/messages",
            "nekro://chats/group_1/files/etc/passwd",
            "file:///etc",
        ):
            with pytest.raises(MCPError):
                await client.read_resource(uri)
        with pytest.raises(MCPError):
            await client.call_tool("nothing")
        with pytest.raises(MCPError):
            await client.get_prompt("nothing")


@pytest.mark.extended
async def test_progress_and_output_are_reported(gateway: httpx.AsyncClient, key: str) -> None:
    # The SDK logs what a callback raises and does not wait for callbacks when it closes, so they only keep
    # what they are given.
    Update = tuple[float, float | None, str | None]
    progress: asyncio.Queue[Update] = asyncio.Queue()
    output: asyncio.Queue[Update] = asyncio.Queue()

    async def on_progress(*update: Any) -> None:
        progress.put_nowait(update)

    async def on_output(*update: Any) -> None:
        output.put_nowait(update)

    async with connected(gateway, key) as client, connected(gateway, key) as other:
        calling = asyncio.create_task(
            client.call_tool("test_tool_with_progress", progress_callback=on_progress)
        )
        for percent in (0, 50, 100):
            assert await progress.get() == (percent, 100, f"{percent} of 100")
            await other.call_tool("seen", {"percent": percent})
        assert (await calling).structured_content == {"result": "done"}
        assert progress.empty()

        code = """
import time
print("begun", flush=True)
while held("printed") is None:
    time.sleep(0.05)
"""
        running = asyncio.create_task(
            client.call_tool("run_code", {"code": code}, progress_callback=on_output)
        )
        length, total, piece = await output.get()
        # Where the text is cut is not promised.
        assert piece and "begun\n".startswith(piece) and (length, total) == (len(piece), None)
        await other.call_tool("hold", {"name": "printed", "seconds": 0})
        ran = await running
        assert ran.content[0].text == "begun\n" and ran.structured_content["stop_type"] == "NORMAL"


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
async def test_cancelling_a_request_stops_the_call_and_the_run(
    gateway: httpx.AsyncClient, key: str, mode: str
) -> None:
    async with connected(gateway, key, mode) as client, connected(gateway, key) as other:
        for tool, name in (("hold", f"call-{mode}"), ("run_code", f"run-{mode}")):
            given = {"name": name} if tool == "hold" else {"code": f"hold({name!r})"}
            calling = asyncio.create_task(client.call_tool(tool, given))
            await until(other, name, "began")
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await until(other, name, "stopped")


async def until(client: Client, name: str, value: str) -> None:
    """Wait until ``hold`` has kept a value."""

    async def kept() -> bool:
        found = await client.call_tool("held", {"name": name})
        return bool(found.structured_content == {"result": value})

    await eventually(kept, what=f"{name} {value}")


async def test_a_long_call_continues_as_a_job(fleet: Fleet, key: str) -> None:
    workers = fleet.settings.workers.model_copy(update={"wait_seconds": 0.2})
    settings = fleet.settings.model_copy(update={"workers": workers})
    all_scopes = await asyncio.to_thread(make_key, fleet.settings, *Scope, chats="group_1")
    async with served(create_app(settings)) as gateway, connected(gateway, all_scopes) as client:
        begun = await client.call_tool("hold", {"name": "job"})
        job_id = begun.structured_content["job_id"]
        assert begun.structured_content["state"] == "running" and job_id in begun.content[0].text
        listed = await client.call_tool("show_jobs")
        assert job_id in [job["id"] for job in listed.structured_content["jobs"]]
        shown = await client.call_tool("show_jobs", {"job_id": job_id})
        waited = await client.call_tool("wait_for_job", {"job_id": job_id, "seconds": 0})
        assert shown.structured_content["state"] == waited.structured_content["state"] == "running"
        resource = await client.read_resource(f"nekro://jobs/{job_id}")
        assert json.loads(resource.contents[0].text)["id"] == job_id
        async with connected(gateway, key) as other:
            refused = await other.call_tool("cancel_job", {"job_id": job_id})
            assert refused.is_error and "scope_missing" in refused.content[0].text
        await until(client, "job", "began")
        await client.call_tool("cancel_job", {"job_id": job_id})
        ended = await client.call_tool("wait_for_job", {"job_id": job_id, "seconds": 60})
        assert ended.structured_content["state"] in ("failed", "cancelled")
        await until(client, "job", "stopped")


@pytest.mark.extended
async def test_a_call_that_requires_approval_waits_for_a_person(
    gateway: httpx.AsyncClient, fleet: Fleet, key: str
) -> None:
    decider = await asyncio.to_thread(make_key, fleet.settings, Scope.APPROVE)

    async def decide(approval_id: str, **decision: str) -> None:
        answer = await gateway.post(
            f"/api/v1/approvals/{approval_id}/decision",
            json=decision,
            headers={"Authorization": f"Bearer {decider}"},
        )
        assert answer.status_code == 200, answer.text

    async with connected(gateway, key) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert "A person must approve each call" in listed["tests-till-pay"].description
        waiting = (await client.call_tool("pay", {"who": "ada"})).structured_content
        assert (waiting["state"], waiting["call"]) == ("awaiting", "tests.till.pay(who='ada')")
        shown = await client.call_tool("show_jobs", {"job_id": waiting["job_id"]})
        assert shown.structured_content == waiting
        await decide(waiting["approval_id"], decision="approve")
        ended = await client.call_tool("wait_for_job", {"job_id": waiting["job_id"], "seconds": 60})
        assert ended.structured_content["state"] == "done" and "receipt ada 1" in ended.content[0].text

        ran = await client.call_tool("run_code", {"code": "print('a')\npay('bob')\nprint('b')"})
        assert not ran.is_error and ran.structured_content["stop_type"] == "APPROVAL"
        call = ran.structured_content["calls"][0]
        assert ran.structured_content["output"] == "a\n"
        assert "tests.till.pay('bob') waits until a person approves it" in ran.content[0].text
        await decide(call["approval_id"], decision="deny", reason="too much")
        denied = await client.call_tool("wait_for_job", {"job_id": call["id"], "seconds": 60})
        assert "approval of tests.till.pay('bob') was denied: too much" in denied.content[0].text

    scopes = (*CALL, Scope.APPROVE)
    trusted = await asyncio.to_thread(make_key, fleet.settings, *scopes, chats="group_1")
    async with connected(gateway, trusted) as client:
        paid = await client.call_tool("pay", {"who": "eve"})
        assert paid.structured_content == {"result": "receipt eve 1"}

    # A key that may read nothing learns what its own calls wait for.
    blind = await asyncio.to_thread(make_key, fleet.settings, Scope.CALL, Scope.RUN, chats="group_1")
    async with connected(gateway, blind) as client:
        waiting = (await client.call_tool("pay", {"who": "joe"})).structured_content
        assert (waiting["state"], waiting["call"]) == ("awaiting", "tests.till.pay(who='joe')")
        ran = await client.call_tool("run_code", {"code": "pay('kim')"})
        assert "tests.till.pay('kim') waits until a person approves it" in ran.content[0].text


async def test_a_key_sees_and_uses_only_what_its_scopes_permit(
    gateway: httpx.AsyncClient, fleet: Fleet
) -> None:
    reader = await asyncio.to_thread(make_key, fleet.settings, Scope.READ, chats="group_1")
    async with connected(gateway, reader) as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == {"show_jobs", "wait_for_job"}
        assert (await client.list_prompts()).prompts == []
        ran = await client.call_tool("run_code", {"code": "1"})
        assert ran.is_error and ran.content[0].text == "scope_missing: the key lacks the scope 'run'"
        with pytest.raises(MCPError, match="lacks the scope 'call'"):
            await client.call_tool("typed", {"text": "x"})
        with pytest.raises(MCPError, match="lacks the scope 'run'"):
            await client.get_prompt("write_code")
    caller = await asyncio.to_thread(make_key, fleet.settings, Scope.CALL, chats="group_1")
    async with connected(gateway, caller) as client:
        assert (await client.list_resources()).resources == []
        with pytest.raises(MCPError, match="lacks the scope 'read'"):
            await client.read_resource("nekro://chats/group_1/messages")
    poster = await asyncio.to_thread(make_key, fleet.settings, Scope.POST)
    with pytest.raises(ExceptionGroup) as refused:
        async with connected(gateway, poster, "legacy"):
            pass
    assert refused.group_contains(MCPError, match="scope_missing: the key lacks the scope 'call'")


async def test_an_error_names_the_value_and_what_to_do(gateway: httpx.AsyncClient, key: str) -> None:
    async with connected(gateway, key) as client:
        for tool, given, text in (
            ("typed", {}, "missing a required argument: 'text'"),
            ("typed", {"text": "x", "other": 1}, "'other'"),
            ("spread", {"first": 1, "rest": 2}, "rest must be an array, not 2"),
            ("find_methods", {"words": "e " * 1000}, "words has 2000 characters, at most 1000"),
            ("large", {"size": 64 << 20}, "can be returned; write it to a file"),
        ):
            failed = await client.call_tool(tool, given)
            assert failed.is_error and text in failed.content[0].text, failed
        for tool, given, text in (
            ("run_code", {}, "code must be a string; it is missing"),
            ("run_code", {"code": 5}, "code must be a string, not 5"),
            ("wait_for_job", {"job_id": "x", "seconds": "soon"}, "seconds must be a number, not 'soon'"),
            ("nothing", {}, "there is no tool 'nothing'; tools/list names"),
        ):
            with pytest.raises(MCPError, match=text):
                await client.call_tool(tool, given)
        missing = await client.call_tool("show_jobs", {"job_id": "x"})
        assert missing.is_error and "there is no job 'x'" in missing.content[0].text
        raised = await client.call_tool("run_code", {"code": "1 / 0"})
        assert raised.is_error and "ZeroDivisionError" in raised.content[0].text


async def test_changes_are_sent_to_subscribers(gateway: httpx.AsyncClient, fleet: Fleet, key: str) -> None:
    poster = await asyncio.to_thread(make_key, fleet.settings, Scope.POST)
    uri = "nekro://chats/group_1/messages"
    async with connected(gateway, key, "2026-07-28") as client:
        async with client.listen(resource_subscriptions=[uri]) as changes:
            posted = await gateway.post(
                "/api/v1/chats/group_1/messages",
                json={"text": "hi", "user_id": "ada", "to_agent": False},
                headers={"Authorization": f"Bearer {poster}"},
            )
            assert posted.status_code == 202, posted.text
            event = await anext(aiter(changes))
            assert event.uri == uri
        for other in ("nekro://chats/group_2/messages", "nekro://jobs/x"):
            with pytest.raises(MCPError, match="not a history that the key may read"):
                async with client.listen(resource_subscriptions=[other]):
                    pass


async def test_a_subscription_ends_when_its_key_is_revoked(gateway: httpx.AsyncClient, fleet: Fleet) -> None:
    key = await asyncio.to_thread(make_key, fleet.settings, Scope.READ, chats="group_1")
    uri = "nekro://chats/group_1/messages"
    async with (
        connected(gateway, key, "2026-07-28") as client,
        client.listen(resource_subscriptions=[uri]) as changes,
    ):
        database = Database(fleet.settings.database, fleet.settings.data_dir)
        await revoke_stored_key(database, key.split("_")[1], by=None, request_id=None)
        await database.dispose()
        async with asyncio.timeout(WAIT_SECONDS):
            async for _ in changes:
                pass


async def test_subscribers_of_a_chat_go_on_after_the_database_has_lost_events(
    gateway: httpx.AsyncClient, fleet: Fleet
) -> None:
    chat_key, database = "lost_1", Database(fleet.settings.database, fleet.settings.data_dir)
    key = await asyncio.to_thread(make_key, fleet.settings, Scope.CALL, Scope.READ, chats=chat_key)

    async def write() -> None:
        async with database.begin() as tx:
            await tx.chats.ensure(chat_key)
            tx.events.add(chat_key, NewEvent(type="message.received"))

    await write()
    uri = f"nekro://chats/{chat_key}/messages"
    async with (
        connected(gateway, key, "2026-07-28") as client,
        client.listen(resource_subscriptions=[uri]) as changes,
    ):
        updates = aiter(changes)
        await write()
        assert (await anext(updates)).uri == uri
        # As a standby that takes over before it has received the last transactions.
        async with database.begin() as tx:
            for change in ("DELETE FROM chat_events", "UPDATE chats SET last_event = 0"):
                await tx.connection.exec_driver_sql(f"{change} WHERE chat_key = '{chat_key}'")
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await anext(updates)).uri == uri
        await write()
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await anext(updates)).uri == uri
    await database.dispose()


async def test_streams_of_a_key_are_limited(fleet: Fleet, key: str) -> None:
    limited = fleet.settings.gateway.model_copy(update={"streams_per_key": 1})
    app = create_app(fleet.settings.model_copy(update={"gateway": limited}))
    async with (
        served(app) as gateway,
        connected(gateway, key, "2026-07-28") as client,
        client.listen(tools_list_changed=True),
    ):
        with pytest.raises(MCPError, match="too_many_streams: the key has 1 open streams"):
            async with client.listen(tools_list_changed=True):
                pass


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
async def test_each_request_may_reach_another_gateway(fleet: Fleet, key: str, mode: str) -> None:
    apps = [create_app(fleet.settings), create_app(fleet.settings)]
    asked = []

    async def alternating(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.append(scope["path"])
        await apps[len(asked) % 2](scope, receive, send)

    async with served(apps[1]), served(alternating) as gateway, connected(gateway, key, mode) as client:
        for number in range(4):
            done = await client.call_tool("typed", {"text": "x", "number": number})
            assert done.structured_content["result"]["number"] == number
        ran = await client.call_tool("run_code", {"code": "print(typed('x')['number'])"})
        assert ran.content[0].text == "3\n"
        assert (await client.read_resource("nekro://chats/group_1/messages")).contents
        calling = asyncio.create_task(client.call_tool("hold", {"name": f"turn-{mode}"}))
        await until(client, f"turn-{mode}", "began")
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await until(client, f"turn-{mode}", "stopped")
    assert len(asked) > 8


async def test_forged_requests_are_refused(gateway: httpx.AsyncClient, key: str) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    sent = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
    for headers, status in (
        ({"Authorization": "Bearer nk_0"}, 401),
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 421),
        ({"Mcp-Session-Id": "a" * 96}, 404),
        ({"X-Nekro-Chat": "group_2"}, 404),
    ):
        answer = await gateway.post("/mcp", json=body, headers={**sent, **headers})
        assert answer.status_code == status, (headers, answer.text)
        assert "ping" not in answer.text and "result" not in answer.json()
    for content, status, text in (
        (b"{", 400, "Parse error"),
        (b"\xff\xfe", 400, "Parse error"),
        (b"[" * 100_000, 400, "Parse error"),
        (b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}', 400, "Validation error"),
        (b'[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', 400, "Validation error"),
    ):
        answer = await gateway.post(
            "/mcp", content=content, headers={**sent, "Content-Type": "application/json"}
        )
        assert (answer.status_code, text in answer.text) == (status, True), (content[:50], answer.text)
    plain = await gateway.post("/mcp", json=body, headers={**sent, "Accept": "text/html"})
    assert plain.status_code == 406
    foreign = await gateway.post("/mcp", content=b"{}", headers={**sent, "Content-Type": "text/plain"})
    assert foreign.status_code in (400, 415)
    # Only the declared size is sent: the gateway answers before it reads a body.
    reader, writer = await asyncio.open_connection(gateway.base_url.host, gateway.base_url.port)
    head = f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {3 << 20}\r\n\r\n"
    writer.write(head.encode())
    assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert (await gateway.get("/mcp", headers=sent)).status_code == 405


@pytest.mark.extended
async def test_a_request_to_one_gateway_the_next_to_another(
    gateway: httpx.AsyncClient, fleet: Fleet, key: str
) -> None:
    sent = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    begun = await gateway.post(
        "/mcp", json={"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": hello}, headers=sent
    )
    sent |= {"Mcp-Session-Id": begun.headers["mcp-session-id"], "Mcp-Protocol-Version": "2025-11-25"}
    foreign = await asyncio.to_thread(make_key, fleet.settings, *CALL, chats="group_1")
    async with served(create_app(fleet.settings)) as other:
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        taken = await other.post("/mcp", json=ping, headers={**sent, "Authorization": f"Bearer {foreign}"})
        assert taken.status_code == 404 and "there is no such session" in taken.text
        params = {"name": "test_simple_text", "arguments": {}}
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        answer = await other.post("/mcp", json=request, headers=sent, timeout=WAIT_SECONDS)
        assert answer.status_code == 200 and "simple text response" in answer.text
        # A request that this gateway serves is cancelled at the other one.
        params = {"name": "hold", "arguments": {"name": "c"}}
        request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}
        held = asyncio.create_task(gateway.post("/mcp", json=request, headers=sent, timeout=WAIT_SECONDS))
        async with connected(gateway, key) as client:
            while (await client.call_tool("held", {"name": "c"})).structured_content["result"] != "began":
                await asyncio.sleep(0.05)
        note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}}
        assert (await other.post("/mcp", json=note, headers=sent)).status_code == 202
        assert '"isError":true' in (await held).text.replace(" ", "")


async def test_requests_of_one_session_with_the_same_number_are_calls_of_their_own(
    fleet: Fleet, gateway: httpx.AsyncClient, key: str
) -> None:
    """As claude.ai numbers its requests; the second call once had the result of the first."""
    sent = {"Authorization": f"Bearer {key}", "Accept": "application/json, text/event-stream"}
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    begun = await gateway.post(
        "/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}, headers=sent
    )
    sent |= {"Mcp-Session-Id": begun.headers["mcp-session-id"], "Mcp-Protocol-Version": "2025-11-25"}

    async def answer(method: str, params: dict[str, Any]) -> str:
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        response = await gateway.post("/mcp", json=request, headers=sent, timeout=WAIT_SECONDS)
        assert response.status_code == 200
        return response.text

    calls = [{"name": "repeat_with_call", "arguments": {"text": text}} for text in ("one", "two", "two")]
    found = [await answer("tools/call", call) for call in calls]
    assert ["one in call" in text for text in found] == [True, False, False]
    assert ["two in call" in text for text in found] == [False, True, True]
    assert len(set(found)) == 3
    assert "repeat_with_call" in await answer("tools/list", {"cursor": ""})


def test_schemas_are_made_from_signatures(fleet: Fleet) -> None:
    services = fleet.services()

    async def read() -> dict[str, Any]:
        await services.start()
        try:
            return input_schema(await services.find_method("typed"))
        finally:
            await services.close()

    schema = asyncio.run(read())
    assert schema["required"] == ["text"] and schema["additionalProperties"] is False
    assert schema["properties"]["choice"] == {"enum": ["a", "b"], "default": "a"}
    assert schema["properties"]["many"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
