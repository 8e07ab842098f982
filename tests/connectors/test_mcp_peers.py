"""What servers of others do over HTTP, one line per behaviour, with where it was reported."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from mcp_world import World, opened
from peer_corpus import (
    CURSORS,
    ENTRIES,
    FILES,
    FORMS,
    HANDSHAKES,
    LOST,
    RAN,
    RESULTS,
    TEXT,
    error,
    hello,
    refused,
    sse,
)
from raw_peer import ACT, ECHO, Behaviour, RawPeer, Reply, raw_peer, reply, said
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import PluginSettings, Settings
from nekro.cli.command import Deps, declare
from nekro.cli.output import Output
from nekro.extensions.mcp import commands
from nekro.extensions.mcp.client.faults import ServerFault
from nekro.extensions.mcp.servers import describe_server
from nekro_agent.errors import MethodFailedError, OutcomeUnknownError
from nekro_agent.testing import InMemoryRuntime
from nekro_client.models import McpServer as ApiServer

pytestmark = pytest.mark.one_python

# -- a session that the server lost ------------------------------------------------------------------


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST.keys())
async def test_a_lost_session_is_opened_again_and_the_call_is_made_once(
    settings: Settings, lost: Reply
) -> None:
    async with raw_peer() as peer, opened(settings, {"url": peer.address}) as world:
        peer.lost = lost
        peer.sessions.clear()
        assert await world.call("act") == "acted"
        assert (peer.opened, peer.ran) == (2, ["act"])
        assert peer.received.count("tools/call") == 2


async def test_calls_in_flight_share_the_new_session(settings: Settings) -> None:
    async with raw_peer() as peer, opened(settings, {"url": peer.address}) as world:
        peer.sessions.clear()
        assert await asyncio.gather(*(world.call("act") for _ in range(8))) == ["acted"] * 8
        assert (peer.opened, peer.ran) == (2, ["act"] * 8)


async def test_a_call_that_runs_in_the_lost_session_gets_its_answer(settings: Settings) -> None:
    """The server lost the session, and still answers what it had begun."""
    may_answer = asyncio.Event()

    def slow(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if (
            message.get("method") != "tools/call"
            or message["params"]["name"] != "act"
            or peer.session != "s1"
        ):
            return None
        found = peer.answer(message)
        found.after = may_answer.wait()
        return found

    async with raw_peer(slow) as peer, opened(settings, {"url": peer.address}) as world:
        first = asyncio.create_task(world.call("act"))
        await eventually(lambda: "tools/call" in peer.received, what="the first call")
        peer.sessions.clear()
        assert await world.call("echo", "meanwhile") == "meanwhile"
        may_answer.set()
        assert await first == "acted"
        assert peer.opened == 2


async def test_a_listing_of_a_lost_session_is_made_in_a_new_one(settings: Settings) -> None:
    async with raw_peer() as peer, opened(settings, {"url": peer.address}) as world:
        peer.sessions.clear()
        _, listing = await world.hub.listing(world.server)
        assert [tool.name for tool in listing.tools] == ["echo", "act"]
        assert peer.opened == 2 and world.listed.errors == []


async def test_a_server_that_knows_no_session_is_an_error_after_one_more(settings: Settings) -> None:
    async with raw_peer() as peer, opened(settings, {"url": peer.address}) as world:
        peer.behaviour = lambda peer, message: (
            refused(404, error(-32001, "Session not found"))
            if message.get("method") == "tools/call"
            else None
        )
        with pytest.raises(MethodFailedError, match="Session not found"):
            await world.call("act")
        assert peer.received.count("tools/call") == 2


@pytest.mark.parametrize(("answer", "kind"), RAN.values(), ids=RAN.keys())
async def test_a_call_that_may_have_run_is_not_repeated(
    settings: Settings, answer: Reply, kind: type[Exception]
) -> None:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return answer if message.get("method") == "tools/call" else None

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        with pytest.raises(kind):
            await world.call("act")
        assert peer.received.count("tools/call") == 1
        peer.behaviour = None
        assert await world.call("echo", "after") == "after"


# -- forms of answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
async def test_an_answer_is_read_in_any_form(settings: Settings, form: Any) -> None:
    """The handshake and the listing come in this form too, and notifications are answered so."""

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return form(message) if message.get("method") == "tools/call" else None

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert await asyncio.wait_for(world.call("echo", "x"), WAIT_SECONDS) == "hello"
        assert peer.received.count("tools/call") == 1


WHOLE = ("java-sdk#748 JSON as text/plain", "events as JSON", "202 with a body", "radare2-mcp#68 id always 0")


@pytest.mark.parametrize("name", WHOLE)
async def test_a_whole_session_is_read_in_any_form(settings: Settings, name: str) -> None:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message["verb"] != "POST" or message.get("method") == "server/discover":
            return None
        found = peer.answer({key: value for key, value in message.items() if key != "verb"})
        if "id" not in message:
            return found
        body = found.body if isinstance(found.body, bytes) else b""
        result = json.loads(body)["result"]
        shaped = FORMS[name](message)
        text = shaped.body.decode().replace(json.dumps(hello(message)["result"]), json.dumps(result))
        return Reply(status=shaped.status, body=text.encode(), kind=shaped.kind, headers=found.headers)

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("echo", "x") == "x"
        assert len(world.plugin.sandbox_methods) == 2


@pytest.mark.parametrize(
    "answer",
    [
        Reply(status=200, kind="application/json"),  # rust-sdk#849
        Reply(status=200, body=b"null"),  # awslabs/mcp#3295
        Reply(status=202, body=b'{"ok": true}'),
        Reply(status=204, kind=None, headers={"Transfer-Encoding": "identity"}),  # chatwise-releases#1360
        Reply(status=200, body=b"OK", kind="text/plain"),  # java-sdk#748
        Reply(status=500, body=b"boom", kind="text/plain"),
    ],
    ids=["200 empty", "200 null", "202 with a body", "204", "200 text", "500"],
)
async def test_whatever_answers_a_notification_is_ignored(settings: Settings, answer: Reply) -> None:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return answer if message["verb"] == "POST" and "id" not in message else None

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("echo", "x") == "x"


async def test_an_answer_with_the_id_of_another_open_request_is_not_used(settings: Settings) -> None:
    """Its body came for this request, but whose result it is, is not certain."""
    first_id: list[int] = []
    is_over = asyncio.Event()

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") != "tools/call":
            return None
        if not first_id:
            first_id.append(message["id"])
            return reply(hello(message), after=is_over.wait())
        return reply(said({"id": first_id[0]}, {"content": [{"type": "text", "text": "of the first"}]}))

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        first = asyncio.create_task(world.call("act"))
        await eventually(lambda: bool(first_id), what="the first call")
        with pytest.raises(OutcomeUnknownError, match="the id of another request"):
            await world.call("act")
        is_over.set()
        assert await first == "hello"


# -- handshakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", HANDSHAKES.values(), ids=HANDSHAKES.keys())
async def test_a_handshake_with_gaps_is_accepted(settings: Settings, result: dict[str, Any]) -> None:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") != "initialize":
            return None
        peer.sessions.add("s")
        return reply(said(message, result), headers={"Mcp-Session-Id": "s"})

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("echo", "x") == "x"
        session = (await world.hub.listing(world.server))[0].session
        assert session.about["protocol"] == result.get("protocolVersion", "2025-11-25")


@pytest.mark.parametrize("status", [400, 401, 404, 405, 406, 415, 422, 500])
async def test_a_server_that_refuses_the_newest_version_is_asked_for_an_older_one(
    settings: Settings, status: int
) -> None:
    """rust-sdk#559: 401 for every first message but `initialize`."""

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return refused(status, b"no", "text/plain") if message.get("method") == "server/discover" else None

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("echo", "x") == "x"


@pytest.mark.parametrize("status", [307, 308])
async def test_a_redirect_is_followed_on_the_same_origin_only(settings: Settings, status: int) -> None:
    async with raw_peer() as other, raw_peer() as peer:

        def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
            return Reply(status=status, kind=None, headers={"Location": other.address})

        async with opened(settings, {"url": f"{peer.address}/"}) as world:
            assert await world.call("echo", "x") == "x"
        peer.behaviour = behave
        with pytest.raises(ServerFault, match="Redirect to"):
            async with opened(settings, {"url": peer.address}):
                pass
        assert other.received == []


@pytest.mark.parametrize("status", [404, 405, 500])
async def test_a_session_ends_whatever_the_server_says_to_its_end(settings: Settings, status: int) -> None:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return Reply(status=status, kind=None) if message["verb"] in ("DELETE", "GET") else None

    async with raw_peer(behave) as peer:
        async with opened(settings, {"url": peer.address}) as world:
            assert await world.call("echo", "x") == "x"
        assert "DELETE" in peer.received


# -- listings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entry", "note", "arguments"), ENTRIES.values(), ids=ENTRIES.keys())
async def test_one_bad_tool_costs_one_tool(
    settings: Settings, entry: Any, note: str | None, arguments: dict[str, Any] | None
) -> None:
    calls: list[Any] = []

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") == "tools/call":
            calls.append(message["params"])
        return None

    tools = [ECHO, entry, ACT]
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("echo", "x") == "x" and await world.call("act") == "acted"
        _, listing = await world.hub.listing(world.server)
        reasons = [one.reason for one in listing.notes]
        assert len(reasons) == (note is not None) and (note or "") in "".join(reasons)
        assert any(one.is_left_out for one in listing.notes) == (arguments is None)
        names = [method.func.__name__ for method in world.plugin.sandbox_methods]
        if arguments is None:
            assert names == ["echo", "act"]
            return
        await world.call(names[1], **arguments)
        assert (calls[-1]["name"], calls[-1]["arguments"]) == (entry["name"], arguments)
        assert world.plugin.sandbox_methods[1].once  # no claim that it may run again


@pytest.mark.parametrize("tools", [None, []])
async def test_a_listing_may_be_empty(settings: Settings, tools: Any) -> None:
    """A nil slice of Go is null."""
    async with raw_peer() as peer:
        peer.tools = tools
        async with opened(settings, {"url": peer.address}) as world:
            _, listing = await world.hub.listing(world.server)
            assert (listing.tools, listing.notes) == ([], [])


@pytest.mark.parametrize("tools", [{"echo": ECHO}, "none", 7])
async def test_a_listing_that_is_none_is_an_error(settings: Settings, tools: Any) -> None:
    """What was listed before stays."""
    async with raw_peer() as peer, opened(settings, {"url": peer.address}) as world:
        peer.tools = tools
        with pytest.raises(ServerFault, match="is not a list"):
            await world.hub.listing(world.server)
        assert len(world.listed.tools) == 1 and await world.call("echo", "x") == "x"


def pages(cursors: dict[str, Any]) -> Behaviour:
    """A listing of one tool per page, each named after its cursor; ``cursors`` has the next ones."""

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") != "tools/list":
            return None
        cursor = (message.get("params") or {}).get("cursor", "first")
        following = cursors[cursor] if cursor in cursors else cursors["*"](cursor)
        return reply(said(message, {"tools": [{**ECHO, "name": f"t_{cursor}"}], "nextCursor": following}))

    return behave


@pytest.mark.parametrize(("cursors", "requests", "note"), CURSORS.values(), ids=CURSORS.keys())
async def test_a_listing_ends(
    settings: Settings, cursors: dict[str, Any], requests: int, note: str | None
) -> None:
    async with raw_peer(pages(cursors)) as peer, opened(settings, {"url": peer.address}) as world:
        assert peer.received.count("tools/list") == requests
        assert len(world.plugin.sandbox_methods) == requests
        notes = world.listed.about[-1]["notes"]
        assert [one["tool"] for one in notes] == [None] * (note is not None)
        assert note is None or note in notes[0]["reason"]


async def test_a_page_that_is_sent_again_ends_the_listing(settings: Settings) -> None:
    """codebase-memory-mcp#1247: every page is the first one, with a new cursor."""
    count = iter(range(1_000))

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") != "tools/list":
            return None
        return reply(said(message, {"tools": [ECHO, ACT], "nextCursor": f"c{next(count)}"}))

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert peer.received.count("tools/list") == 2
        assert len(world.plugin.sandbox_methods) == 2


async def test_a_page_that_fails_leaves_those_before(settings: Settings) -> None:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") == "tools/list" and (message.get("params") or {}).get("cursor"):
            return refused(400, error(-32602, "Invalid cursor"))
        return pages({"first": "a"})(peer, message)

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert len(world.plugin.sandbox_methods) == 1
        assert "page 2 of the listing failed" in world.listed.about[-1]["notes"][0]["reason"]


# -- results ----------------------------------------------------------------------------------------------


def returning(result: Any, **tool: Any) -> tuple[Behaviour, list[Any]]:
    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return reply(said(message, result)) if message.get("method") == "tools/call" else None

    return behave, [{**ACT, **tool}]


@pytest.mark.parametrize(("result", "value"), RESULTS.values(), ids=RESULTS.keys())
async def test_a_result_is_read_in_any_form(settings: Settings, result: Any, value: Any) -> None:
    behave, tools = returning(result)
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("act") == value


#: Output schemas, and structured content that they do not describe.
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "required": ["b"]}, {"a": 1}),
        ({"type": "object"}, [1]),
        ({"type": "array"}, {"a": 1}),
        ({"type": {"x": 1}}, {"a": 1}),
    ],
)
async def test_structured_content_that_is_not_of_its_schema_is_the_value(
    settings: Settings, schema: Any, value: Any, caplog: Any
) -> None:
    behave, tools = returning({"content": [], "structuredContent": value}, outputSchema=schema)
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("act") == value


async def test_a_result_without_the_structured_content_of_its_schema_is_its_parts(settings: Settings) -> None:
    """MCP-Nest#79, Letta-MCP-server#102."""
    behave, tools = returning({"content": [TEXT]}, outputSchema={"type": "object"})
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("act") == "t"


@pytest.mark.parametrize("flag", [True, "true", 1])
async def test_an_error_without_a_text_shows_what_there_is(settings: Settings, flag: Any) -> None:
    behave, tools = returning({"isError": flag, "structuredContent": {"reason": "full"}})
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        with pytest.raises(MethodFailedError, match="full"):
            await world.call("act")


@pytest.mark.parametrize(("part", "content", "suffix"), FILES.values(), ids=FILES.keys())
async def test_a_file_is_decoded_in_any_form(
    settings: Settings, part: dict[str, Any], content: bytes, suffix: str
) -> None:
    behave, tools = returning({"content": [part]})
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        async with InMemoryRuntime(data_dir=settings.data_dir):
            path = await world.call("act")
        assert path.endswith(suffix)
        name = path.rpartition("/")[2]
        (stored,) = settings.data_dir.rglob(name)
        assert stored.read_bytes() == content


async def test_a_file_that_is_not_base64_is_an_error(settings: Settings) -> None:
    behave, tools = returning({"content": [{"type": "image", "data": "!?", "mimeType": "image/png"}]})
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        with pytest.raises(MethodFailedError, match="not base64"):
            await world.call("act")


# -- slow servers -------------------------------------------------------------------------------------------


async def test_calls_do_not_wait_for_a_listing(settings: Settings) -> None:
    """What is known from before is used while the server lists its tools."""
    may_list = asyncio.Event()
    lists = 0

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        nonlocal lists
        if message.get("method") != "tools/list":
            return None
        lists += 1
        found = peer.answer(message)
        found.after = may_list.wait() if lists > 1 else None
        return found

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        again = asyncio.create_task(world.hub.listing(world.server))
        await eventually(lambda: lists == 2, what="the second listing")
        assert await world.call("echo", "meanwhile") == "meanwhile"
        peer.sessions.clear()  # also in a new session, whose listing is slow too
        assert await world.call("act") == "acted"
        may_list.set()
        await again


async def test_a_listing_that_fails_leaves_the_session_to_calls(settings: Settings) -> None:
    async with raw_peer() as peer, opened(settings, {"url": peer.address}) as world:
        peer.behaviour = lambda peer, message: (
            refused(500, b"no", None) if message.get("method") == "tools/list" else None
        )
        with pytest.raises(ServerFault, match="status 500: no"):
            await world.hub.listing(world.server)
        assert await world.call("echo", "x") == "x"
        assert peer.opened == 1 and "status 500: no" in world.listed.errors[-1]


async def test_a_listing_that_hangs_is_an_error_and_delays_nothing_else(settings: Settings) -> None:
    brief = settings.model_copy(update={"plugins": PluginSettings(start_seconds=1)})
    never = asyncio.Event()

    def hangs(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        return Reply(after=never.wait()) if message.get("method") == "tools/list" else None

    async with raw_peer(hangs) as peer, raw_peer() as other:
        slow, quick = (
            World(brief, {"url": peer.address}, "slow"),
            World(brief, {"url": other.address}, "quick"),
        )
        try:
            listing = asyncio.create_task(slow.hub.listing(slow.server))
            await eventually(lambda: "tools/list" in peer.received, what="the request")
            assert len((await slow.hub.listing(quick.server))[1].tools) == 2
            assert not listing.done()
            with pytest.raises(ServerFault, match="did not list its tools within 1 s"):
                await listing
            assert slow.listed.errors == ["it did not list its tools within 1 s"]
        finally:
            never.set()
            await slow.hub.close()


async def test_a_change_that_the_server_announces_by_its_stream_is_listed(settings: Settings) -> None:
    """The stream of the session: the message comes without a name, with members that do not belong there."""
    may_change = asyncio.Event()
    changed = {"jsonrpc": "2.0", "id": None, "method": "notifications/tools/list_changed", "params": []}

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message["verb"] != "GET":
            return None
        return Reply(
            body=sse(f"id: 1\ndata: {json.dumps(changed)}\n\n"),
            kind="text/event-stream",
            after=may_change.wait(),
        )

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        peer.tools = [*peer.tools, {**ACT, "name": "fresh"}]
        may_change.set()
        await eventually(lambda: "fresh" in world.listed.tools[-1], what="the new listing")
        assert await world.call("fresh") == "acted"


async def test_faulty_tools_are_named_by_the_api_and_the_command(settings: Settings) -> None:
    tools = [ECHO, {"name": "open"}, {"inputSchema": {}}]
    async with raw_peer(tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        _, listing = await world.hub.listing(world.server)
        server = replace(world.server, about=world.listed.about[-1], is_current=True)
    shown = ApiServer.model_validate(describe_server(server))
    assert [(note.tool, note.is_left_out) for note in shown.notes] == [("open", False), ("entry 3", True)]
    trial: dict[str, Any] = {
        "name": "odd", "plugin": "mcp.odd", "error": None, "confinement": None, "tools": [],
        "about": {"name": "raw", "version": "1", "protocol": "2025-11-25"},
        "notes": listing.described_notes(),
    }  # fmt: skip
    words = io.StringIO()
    output = Output(stdout=io.StringIO(), stderr=words)
    parser = argparse.ArgumentParser()
    declare(commands.Args, parser)
    args = commands.Args(**vars(parser.parse_args(["test", "odd"])))
    deps = Deps(output=output, data_dir=None, load_settings=lambda: settings)
    assert commands.show_test(trial, args, deps) == 0
    assert "note open: it has no inputSchema; its arguments are passed on" in words.getvalue()
    assert "left out entry 3: it has no name" in words.getvalue()


async def test_an_answer_is_taken_from_a_stream_that_is_resumed(settings: Settings) -> None:
    asked: list[dict[str, Any]] = []

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") == "tools/call":
            asked.append(message)
            return Reply(body=b"id: 7\nretry: 1\ndata:\n\n", kind="text/event-stream")
        if message["verb"] == "GET" and peer.headers.get("last-event-id") == "7":
            body = sse(f"event: message\r\ndata: {json.dumps(hello(asked[0]))}\r\n\r\n")
            return Reply(body=body, kind="text/event-stream")
        return None

    async with raw_peer(behave) as peer, opened(settings, {"url": peer.address}) as world:
        assert await asyncio.wait_for(world.call("act"), WAIT_SECONDS) == "hello"
        assert len(asked) == 1


async def test_a_server_of_the_newest_version_with_gaps_is_used(settings: Settings) -> None:
    """Arguments become headers where its schema says so; a tool that asks for a bad one is left out."""
    named = {"type": "object", "properties": {"text": {"type": "string", "x-mcp-header": "Text"}}}
    bad = {"type": "object", "properties": {"text": {"type": "number", "x-mcp-header": "a b"}}}
    seen: list[dict[str, str]] = []

    def behave(peer: RawPeer, message: dict[str, Any]) -> Reply | None:
        if message.get("method") == "server/discover":
            return reply(said(message, {"supportedVersions": ["2026-07-28", 7], "capabilities": None}))
        if message.get("method") == "initialize":
            return refused(400, b"no")
        if message.get("method") == "tools/call":
            seen.append(peer.headers)
        found = peer.answer({key: value for key, value in message.items() if key != "verb"})
        return found if message["verb"] == "POST" else None

    tools = [{**ECHO, "inputSchema": named}, {**ACT, "inputSchema": bad}]
    async with raw_peer(behave, tools=tools) as peer, opened(settings, {"url": peer.address}) as world:
        assert await world.call("echo", text="x") == "x"
        assert seen[0]["mcp-param-text"] == "x" and "mcp-session-id" not in seen[0]
        (note,) = world.listed.about[-1]["notes"]
        assert note["is_left_out"] and "x-mcp-header" in note["reason"]
        assert world.listed.about[-1]["protocol"] == "2026-07-28"
