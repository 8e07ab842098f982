"""Attempts to misuse a gateway, as raw bytes over sockets; ``attack_table`` has them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import select
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from attack_table import KEYED, LIMITED, LOCAL, OTHERS, PAGE, Attempt, World, page
from local_key import local_headers
from raw_http import RawAnswer, raw, request_bytes
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from broker_config.settings import Settings
from nekro.extensions.openai.rows import ResponseRows, StoredResponse
from nekro.extensions.webhooks.rows import WebhookRows
from nekro.gateway.app import create_app
from nekro.gateway.web import bodies, requests
from nekro.gateway.web.server import GatewayServer
from nekro.operations.actor import Scope
from nekro.operations.keys import new_key, revoke_stored_key, store_key
from nekro.wire.values import encode_arguments
from nekro_agent.shared_clock import shared_time
from storage.accounts.approvals import NewApproval
from storage.engine import Database
from storage.repositories.jobs import NewJob
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind

DOCS = Path(__file__).parents[2] / "docs"
_KEYS = {
    "all": {"scopes": tuple(Scope)},
    "read": {"scopes": (Scope.READ,)},
    "post": {"scopes": (Scope.POST,)},
    "call": {"scopes": (Scope.CALL,)},
    "run": {"scopes": (Scope.RUN,)},
    "admin": {"scopes": (Scope.ADMIN,)},
    "some": {"scopes": tuple(Scope), "chats": "site-*"},
    "bob": {"scopes": tuple(Scope), "user_id": "bob"},
    "limited": {"scopes": tuple(Scope), "tokens_per_day": 1000},
    "revoked": {"scopes": tuple(Scope)},
    "expired": {"scopes": tuple(Scope), "expires_at": timedelta(days=1)},
}


@asynccontextmanager
async def attacked(settings: Settings, **changes: object) -> AsyncIterator[int]:
    """Serve a gateway as `nekro gateway` does; returns its port."""
    gateway = settings.gateway.model_copy(update=changes)
    app = create_app(settings.model_copy(update={"gateway": gateway}))
    async with app.router.lifespan_context(app):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
            server = GatewayServer(app, gateway)
            ready = asyncio.Event()
            running = asyncio.create_task(server.run_on(listener, on_ready=ready.set))
            await ready.wait()
            try:
                yield port
            finally:
                server.should_exit = True
                await running


async def world_of(fleet: Fleet) -> World:
    """Create keys, and a chat that none of the restricted ones has."""
    database = Database(fleet.settings.database, fleet.settings.data_dir)
    keys = {}
    for name, options in _KEYS.items():
        given = {k: shared_time() + v if isinstance(v, timedelta) else v for k, v in options.items()}
        new, keys[name] = new_key(name, **given)  # type: ignore[arg-type]
        await store_key(database, new, by=None, request_id=None)
        if name == "revoked":
            await revoke_stored_key(database, new.id, by=None, request_id=None)
    async with database.begin() as transaction:
        await transaction.connection.exec_driver_sql(
            "UPDATE api_keys SET expires_at = '2020-01-01 00:00:00.000000' WHERE name = 'expired'"
        )
    async with database.begin() as transaction:
        job = await transaction.jobs.add(NewJob(type="t", task_id="t", plugin_key="p.p", chat_key="secret"))
        await transaction.chats.ensure("secret")
        request = RoundRequest(chat_key="secret", trigger_kind=TriggerKind.MANUAL, trigger_id="x")
        round_, _ = await transaction.rounds.request(request)
        timer = await transaction.timers.add(
            "secret", fire_at=shared_time() + timedelta(days=1), description="d"
        )
        await ResponseRows(transaction.connection).add(
            StoredResponse(
                id="resp", key_id=keys["all"].split("_")[1], chat_key="secret", turn_id=round_.turn_id,
                previous_id=None, model="nekro", is_background=True, stated={}, created_at=shared_time(),
            )
        )  # fmt: skip
        await transaction.approvals.add(_request(expires_at=shared_time() + timedelta(days=1)))
        await WebhookRows(transaction.connection).add(
            "hook", url="https://example.com", description="", events=["*"], chats="*"
        )
    await database.dispose()
    ids = {
        "job": job.id, "turn": round_.turn_id, "timer": timer.id, "key": keys["all"].split("_")[1],
        "response": "resp", "webhook": "hook", "approval": "asked", "file": await _stored_file(fleet),
    }  # fmt: skip
    return World(keys=keys, ids=ids)


def _request(*, expires_at: datetime) -> NewApproval:
    """Return a request for approval in the chat ``secret`` whose call is not recorded."""
    return NewApproval(
        id="asked", call_id="c", chat_key="secret", turn_id=None, round_id=None, root_turn_id=None,
        user_id=None, method="a.m.f", lane="methods", arguments=encode_arguments((), {}), digest="0" * 64,
        expires_at=expires_at,
    )  # fmt: skip


async def _stored_file(fleet: Fleet) -> str:
    """Store a file in the chat ``secret``; returns its id."""
    services = fleet.services()
    files = services.files_of(await services.chat("secret"))
    stored = await asyncio.to_thread(files.add, "secret.txt", b"secret content")
    await services.close()
    return services.file_ids.make("secret", stored.path, modified_ns=stored.modified_ns)


async def failures(
    port: int, world: World, table: Mapping[str, Sequence[Attempt]], *, at_once: bool = False
) -> list[str]:
    """Make the attempts; returns a line for each that got something else than the table says."""
    attempts = [attempt for group in table.values() for attempt in group]

    async def one(attempt: Attempt) -> RawAnswer:
        return await raw(port, attempt.send(world), ends=attempt.ends)

    if at_once:
        answers = list(await asyncio.gather(*map(one, attempts)))
    else:
        answers = [await one(attempt) for attempt in attempts]
    wrong = []
    for attempt, answer in zip(attempts, answers, strict=True):
        if (answer.status, answer.code) != attempt.gets:
            wrong.append(f"{attempt.text}: {answer.status} {answer.code!r} {answer.body[:300]!r}")
        if answer.code:
            wrong += [f"{attempt.text}: {line}" for line in leaks(answer, world)]
    return wrong


def leaks(answer: RawAnswer, world: World) -> list[str]:
    """Return what an answer shows that it must not, and the headers that it lacks."""
    found = [name for name, key in world.keys.items() if key.encode() in answer.body]
    found += ["a traceback"] if b"Traceback" in answer.body or b"site-packages" in answer.body else []
    for name, value in (
        ("cache-control", "no-store"),
        ("x-content-type-options", "nosniff"),
        ("cross-origin-resource-policy", "same-origin"),
    ):
        if answer.headers.get(name) != value:
            found.append(f"no {name}")
    if "default-src 'none'" not in answer.headers.get("content-security-policy", ""):
        found.append("no content-security-policy")
    if "access-control-allow-origin" in answer.headers:
        found.append("a permission for other origins")
    if not re.fullmatch(r"[0-9a-f]{32}", answer.headers.get("x-request-id", "")):
        found.append("no request id")
    return found


@pytest.mark.extended
async def test_a_gateway_with_keys_withstands_the_attempts(fresh_fleet: Fleet) -> None:
    world = await world_of(fresh_fleet)
    async with attacked(fresh_fleet.settings) as port:
        used = world.bearer("all", **{"Idempotency-Key": "used"})
        first = request_bytes("POST", "/api/v1/chats/site-1/messages", used, {"text": "a", "user_id": "u"})
        assert (await raw(port, first)).status == 202
        used = world.bearer("all", **{"Idempotency-Key": "used-for-keys"})
        made = await raw(
            port, request_bytes("POST", "/api/v1/keys", used, {"name": "x", "scopes": ["admin"]})
        )
        assert made.status == 201
        wrong = await failures(port, world, KEYED)
        assert not wrong, "\n".join(wrong)
        # The other chat is as it was, and every key still works.
        done = await raw(
            port, request_bytes("GET", f"/api/v1/turns/{world.ids['turn']}", world.bearer("all"))
        )
        assert done.status == 200 and b'"waiting"' in done.body
        asked = await raw(port, request_bytes("GET", "/api/v1/approvals/asked", world.bearer("all")))
        assert asked.status == 200 and b'"pending"' in asked.body
        kept = f"/api/v1/chats/secret/files/{world.ids['file']}"
        assert (await raw(port, request_bytes("GET", kept, world.bearer("all")))).body == b"secret content"
        listed = await raw(port, request_bytes("GET", "/api/v1/keys", world.bearer("all")))
        assert (listed.status, listed.headers["cache-control"]) == (200, "no-store")


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_gateway_on_loopback_withstands_web_sites_and_other_users(fresh_fleet: Fleet) -> None:
    world = World(keys={}, ids={})
    async with attacked(fresh_fleet.settings) as port:
        wrong = await failures(port, world, LOCAL)
        assert not wrong, "\n".join(wrong)
        own = {
            "Host": f"localhost:{port}",
            "Origin": f"http://localhost:{port}",
            "Sec-Fetch-Site": "same-origin",
            **local_headers(fresh_fleet.settings.data_dir),
        }
        page_of_own = request_bytes("POST", "/api/v1/chats/c/messages", own, {"text": "a", "user_id": "u"})
        assert (await raw(port, page_of_own)).status == 202
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        followed = await raw(port, request_bytes("GET", "/api/v1/keys", link))
        assert followed.status == 401 and "sandbox" in followed.headers["content-security-policy"]


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_slow_clients_lose_their_connections_and_others_are_served(fresh_fleet: Fleet) -> None:
    world = await world_of(fresh_fleet)
    async with attacked(fresh_fleet.settings, body_seconds=1.0) as port:
        slow = asyncio.create_task(failures(port, world, LIMITED, at_once=True))
        assert (await raw(port, request_bytes("GET", "/healthz"))).status == 200
        assert await slow == []


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_connection_between_two_requests_outlives_the_limit_of_a_request(fresh_fleet: Fleet) -> None:
    async with attacked(fresh_fleet.settings, body_seconds=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            (length,) = re.findall(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length))
            await asyncio.sleep(2)
        writer.write(b"GET /healthz HTTP/1.1\r\n")  # headers that never end
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_long_body_in_small_pieces_is_refused(fresh_fleet: Fleet) -> None:
    world = await world_of(fresh_fleet)
    async with attacked(fresh_fleet.settings, body_seconds=1.0) as port:
        for method, path in (("PUT", "/api/v1/chats/site-1/files/a"), ("POST", "/v1/chat/completions")):
            headers = {**world.bearer("all"), "Content-Length": "1000000", "Content-Type": "application/json"}
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(method, path, headers))
            answer = asyncio.create_task(reader.readline())

            async def is_refused(answer: asyncio.Task[bytes] = answer, writer: Any = writer) -> bool:
                writer.write(b" ")
                return answer.done()

            await eventually(is_refused, what="the refusal")
            assert (await answer).startswith(b"HTTP/1.1 408 ")
            writer.close()


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_long_bodies_of_one_key_are_in_memory_up_to_a_limit(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MOST_KEPT_BYTES", 8 << 20)
    world = await world_of(fresh_fleet)
    whole, most = 4 << 20, (4 << 20) - 1

    def begun(key: str, path: str = "/api/v1/chats/site-1/messages", method: str = "POST") -> bytes:
        """Return a request with all of its body but the last byte."""
        sent = b'{"text": "a", "user_id": "u"' + b" " * most
        return request_bytes(method, path, {**world.bearer(key), "Content-Length": str(whole)}, sent[:most])

    async with attacked(fresh_fleet.settings, media_bytes=8 << 20) as port:
        # Uploads are not in memory, and short bodies do not count.
        free = [await _opened(port, begun("all", "/api/v1/chats/site-1/files/a", "PUT")) for _ in range(4)]
        held = [await _opened(port, begun(key)) for key in ("all", "all", "post", "post")]

        async def is_refused(key: str) -> bool:
            refused = await raw(port, begun(key) + b"}")
            return (refused.status, refused.code) == (503, "overloaded")

        for key in ("all", "post", "limited"):  # of the third all keys together have too many
            await eventually(functools.partial(is_refused, key), what="a refusal")
        short = request_bytes(
            "POST", "/api/v1/chats/site-1/messages", world.bearer("all"), {"text": "a", "user_id": "u"}
        )
        assert (await raw(port, short)).status == 202
        for reader, writer in held:
            writer.write(b"}")
            assert b" 202 " in await reader.readline()
            writer.close()
        for _, writer in free:
            writer.close()
        assert (await raw(port, begun("all") + b"}")).status == 202


async def _opened(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect and send bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


@pytest.mark.extended
@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_a_client_that_takes_no_answer_loses_its_connection(
    fresh_fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(requests, "SEND_SECONDS", 0.5)
    world = await world_of(fresh_fleet)
    async with attacked(fresh_fleet.settings, body_seconds=1.0) as port:

        async def ask(method: str, path: str, body: Any = None) -> RawAnswer:
            return await raw(port, request_bytes(method, path, world.bearer("all"), body))

        stored = await ask("PUT", "/api/v1/chats/site-1/files/long", b"x" * (8 << 20))
        for _ in range(40):
            long = {"text": "x" * 250_000, "user_id": "ada", "to_agent": False}
            assert (await ask("POST", "/api/v1/chats/site-1/messages", long)).status == 202
        # A file is sent in pieces, a list at once: of a list the end waits when the answer is complete.
        of_file = request_bytes("GET", json.loads(stored.body)["url"], world.bearer("all"))
        of_list = request_bytes("GET", "/api/v1/chats/site-1/messages", world.bearer("all"))
        asked = (
            of_file,
            of_list,
            of_list.replace(b"Connection: close\r\n", b""),
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000,
        )
        clients = [await asyncio.to_thread(_deaf_client, port, request) for request in asked]
        for client in clients:
            await asyncio.to_thread(_wait_for_reset, client)
            client.close()
        # One that takes a little at a time gets all of it.
        with await asyncio.to_thread(_deaf_client, port, of_list, most_bytes=512 << 10) as slow:
            assert await asyncio.to_thread(_slowly_read, slow) > 40 * 250_000
        assert (await raw(port, request_bytes("GET", "/healthz"))).status == 200
    assert "without completing" not in caplog.text


def _deaf_client(port: int, request: bytes, *, most_bytes: int = 4096) -> socket.socket:
    """Return a connection that sends a request and takes nearly nothing of the answers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, most_bytes)
    client.connect(("127.0.0.1", port))
    client.settimeout(1)
    with contextlib.suppress(TimeoutError, ConnectionError):
        client.sendall(request)
    return client


def _slowly_read(client: socket.socket) -> int:
    """Return the number of bytes until the server closes; they take several times its time limit."""
    received = pause_at = 0
    while data := client.recv(1 << 20):
        received += len(data)
        if received > pause_at:
            pause_at = received + (512 << 10)
            time.sleep(0.1)
    return received


def _wait_for_reset(client: socket.socket) -> None:
    """Wait until the server has reset a connection, without taking anything from it."""
    poll = select.poll()
    poll.register(client, 0)  # errors and resets are always reported
    assert poll.poll(WAIT_SECONDS * 1000), "the connection stands"


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_more_connections_than_the_limit_are_refused_and_then_served_again(fresh_fleet: Fleet) -> None:
    async with attacked(fresh_fleet.settings, connections=20) as port:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for reader, writer in streams:
            writer.write(b"GET /api/v1/chats/c/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readline()
        assert (await raw(port, request_bytes("GET", "/healthz"))).status == 503
        for _, writer in streams:
            writer.close()

        async with asyncio.timeout(WAIT_SECONDS):
            while (await raw(port, request_bytes("GET", "/healthz"))).status != 200:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_only_listed_origins_get_a_permission(fresh_fleet: Fleet) -> None:
    world = await world_of(fresh_fleet)
    async with attacked(fresh_fleet.settings, cors_origins=("https://app.example",)) as port:
        for origin, allowed in (("https://app.example", True), ("https://app.example.evil", False)):
            preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answer = await raw(port, request_bytes("OPTIONS", "/api/v1/keys", preflight))
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            got = await raw(port, request_bytes("GET", "/api/v1/keys", world.bearer("all", Origin=origin)))
            assert got.status == 200
            assert (got.headers.get("access-control-allow-origin") == origin) is allowed
            assert "access-control-allow-credentials" not in got.headers


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_every_route_but_the_probes_needs_a_key(fresh_fleet: Fleet) -> None:
    await world_of(fresh_fleet)
    # A link is a key for its one file. Webhooks are closed unless an operator opens a plugin, and clients of
    # adapters have an access key of their own. A login has its key in the body (``test_console_session.py``).
    open_paths = {
        *("/healthz", "/readyz", "/links/{token}/{name}"),
        *("/api/webhook/{endpoint}", "/api/adapters/sse/connect"),
    }
    async with attacked(fresh_fleet.settings) as port:
        paths = create_app(fresh_fleet.settings).openapi()["paths"]
        assert len(paths) > 25
        del paths["/console/session"]
        for path, operations in paths.items():
            target = re.sub(r"\{\w+\}", "x", path)
            for method in operations:
                answer = await raw(port, request_bytes(method.upper(), target, body={}))
                assert (answer.status == 401) is (path not in open_paths), (method, path, answer)
                assert path in ("/healthz", "/readyz") or answer.status >= 400, (method, path, answer)


@pytest.mark.parametrize("fresh_fleet", ["sqlite"], indirect=True)
async def test_request_ids_of_clients_are_used_if_they_are_harmless(fresh_fleet: Fleet) -> None:
    async with attacked(fresh_fleet.settings) as port:
        for given, used in (("order-17.a", True), ("<script>", False), ("a b", False), ("x" * 200, False)):
            answer = await raw(port, request_bytes("GET", "/api/v1/nothing", {"X-Request-Id": given}))
            assert (answer.headers["x-request-id"] == given) is used
            assert answer.headers["x-request-id"].encode() in answer.body


def test_the_page_lists_the_attempts() -> None:
    assert sum(len(group) for table in (KEYED, LOCAL, LIMITED) for group in table.values()) >= 60
    assert (DOCS / PAGE).read_text("utf-8") == page()
    assert all((Path(__file__).parent / test).exists() for _, _, test in OTHERS)
