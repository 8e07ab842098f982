"""The stream of changes: hints, who gets them, and what a reader that reconnects gets."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import httpx
import pytest
import redis
from gateway_server import served
from test_stream_tickets import make_key
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from broker_config.keys import Keys
from nekro.app.chats.events import record
from nekro.app.services import Services
from nekro.gateway.app import create_app
from nekro.gateway.streams.change_kinds import ChangeReader, Hint
from nekro.operations.actor import Identity, Scope
from nekro.operations.keys import revoke_stored_key
from nekro_agent.shared_clock import shared_time
from nekro_client import AsyncClient, Client
from nekro_client.models import ChangeKind
from nekro_client.sse import EventParser
from storage.repositories.events import NewEvent

PATH = "/api/v1/changes"
CHAT = "group_1"


@pytest.fixture
async def services(services: Services) -> Services:
    """A process beside the gateways that writes."""
    async with services.database.begin() as tx:
        await tx.chats.ensure(CHAT)
        await tx.chats.ensure("other")
    return services


async def write(services: Services, chat_key: str, *types: str) -> None:
    async with services.database.begin() as tx:
        record(tx, services.publisher, chat_key, *(NewEvent(type=one) for one in types))


class Reader:
    """A reader of changes; ``seen`` has the kind and chat of each hint."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.last_id = ""
        self.is_over = False
        self._came = asyncio.Condition()

    async def follow(self, response: httpx.Response) -> None:
        parser = EventParser()
        async for chunk in response.aiter_bytes():
            for sent in parser.feed(chunk):
                data = json.loads(sent.data)
                self.last_id = sent.last_id
                self.seen.append((data.pop("kind"), data.pop("chat_key")))
                assert data == {}
            async with self._came:
                self._came.notify_all()
        self.is_over = True
        async with self._came:
            self._came.notify_all()

    async def until(self, is_met: Callable[[], bool]) -> None:
        try:
            async with self._came, asyncio.timeout(WAIT_SECONDS):
                await self._came.wait_for(is_met)
        except TimeoutError:
            pytest.fail(f"got only {self.seen}")

    async def hears(self, kind: str, chat_key: str | None = None) -> None:
        await self.until(lambda: (kind, chat_key) in self.seen)


async def without(http: httpx.AsyncClient, path: str) -> int:
    """Return the status of a request without a key."""
    async with httpx.AsyncClient(base_url=http.base_url, verify=False) as other:
        return (await other.get(path)).status_code


@asynccontextmanager
async def reading(
    http: httpx.AsyncClient, headers: dict[str, str] | None = None, *, path: str = PATH, after: str = ""
) -> AsyncIterator[Reader]:
    """A reader that has got the first hint."""
    sent = {**(headers or {}), **({"Last-Event-ID": after} if after else {})}
    reader = Reader()
    async with http.stream("GET", path, headers=sent, timeout=None) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        task = asyncio.create_task(reader.follow(response))
        try:
            await reader.until(lambda: bool(reader.seen))
            yield reader
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def two(fresh_fleet: Fleet) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Two gateways."""
    async with (
        served(create_app(fresh_fleet.settings)) as one,
        served(create_app(fresh_fleet.settings)) as other,
    ):
        yield one, other


@pytest.mark.extended
async def test_a_change_through_one_gateway_arrives_at_the_other_once(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    one, other = two
    async with reading(one) as here, reading(other) as there:
        assert here.seen[0] == there.seen[0] == ("reset", None)
        body = {"text": "hello", "user_id": "ada"}
        posted = await other.post(f"/api/v1/chats/{CHAT}/messages", json=body)
        assert posted.is_success, posted.text
        for reader in (here, there):
            await reader.hears("chats", CHAT)
            await reader.hears("turns", CHAT)
        # What a gateway writes itself comes from the broker too. A later hint shows that it has come.
        await write(services, "other", "job.progress")
        for reader in (here, there):
            await reader.hears("jobs", "other")
            assert [one for one in reader.seen if one[1] == CHAT].count(("chats", CHAT)) == 1


async def test_a_key_gets_hints_about_its_chats_and_what_it_may_list(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    _, of_one = await make_key(services, Scope.READ, chats="group_*")
    _, of_admin = await make_key(services, Scope.ADMIN, chats="group_*")
    _, of_approver = await make_key(services, Scope.APPROVE)
    _, of_all = await make_key(services, *Scope)
    _, of_poster = await make_key(services, Scope.POST)
    http = two[0]
    refused = await http.get(PATH, headers=of_poster)
    assert (refused.status_code, refused.json()["code"]) == (403, "scope_missing")
    assert await without(http, PATH) == 401
    async with (
        reading(http, of_one) as one,
        reading(http, of_admin) as admin,
        reading(http, of_approver) as approver,
        reading(http, of_all) as whole,
    ):
        for chat_key in ("other", CHAT):
            events = ("message.received", "turn.started", "job.started", "approval.requested")
            await write(services, chat_key, *events)
        async with services.database.begin() as tx:
            for chat_key in ("other", CHAT):
                at = shared_time() + timedelta(days=1)
                await tx.timers.add(chat_key, fire_at=at, description="tea")
        await make_key(services)  # something that is of no chat
        kinds = ("chats", "turns", "jobs", "approvals", "timers")
        for kind in kinds:
            for chat_key in ("other", CHAT):
                await whole.hears(kind, chat_key)
        await whole.hears("keys")
        await whole.hears("audit")
        # The last change: earlier ones would have arrived before it.
        await write(services, CHAT, "job.ended", "approval.decided")
        for reader in (one, admin, approver):
            await reader.hears("approvals" if reader is approver else "jobs", CHAT)
        await admin.hears("timers", CHAT)
        of_chat = {kind: (kind, CHAT) for kind in kinds}
        assert set(one.seen[1:]) == {of_chat[kind] for kind in ("chats", "turns", "jobs", "approvals")}
        assert set(admin.seen[1:]) <= {of_chat["jobs"], of_chat["timers"]}
        assert set(approver.seen[1:]) == {("approvals", "other"), ("approvals", CHAT)}


@pytest.mark.extended
async def test_changes_without_an_event_are_found(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], fresh_fleet: Fleet, services: Services
) -> None:
    http = two[0]
    broker = fresh_fleet.settings.broker
    async with reading(http) as reader:
        with redis.Redis.from_url(str(broker.url)) as client:
            client.lpush(Keys(prefix=broker.key_prefix).dead, json.dumps({"id": uuid.uuid4().hex}))
            await reader.hears("dead_letters")
            client.lpush(f"{broker.key_prefix}methods", "{}")
            await reader.hears("queues")
        server = {"declaration": {"command": "true"}, "is_enabled": False}
        declared = await two[1].put("/api/v1/mcp/servers/clock", json=server)
        assert declared.is_success, declared.text
        await reader.hears("mcp_servers")
        async with services.database.begin() as tx:
            await tx.plugin_states.set("Ada.kitchen", is_enabled=False)
        await reader.hears("plugins")
        async with services.database.begin() as tx:
            await tx.connection.exec_driver_sql(
                "INSERT INTO spending_totals"
                " (scope, period, id, tokens, cost, rounds, sandbox_seconds, warned, updated_at)"
                " VALUES ('day', '2026-11-25', '', 1, 1.0, 1, 0.0, '', '2026-11-25 10:00:00.000000')"
            )
        await reader.hears("costs")
        (worker,) = await asyncio.to_thread(fresh_fleet.start, "methods")
        await reader.hears("workers")
        del reader.seen[:]
        worker.kill()
        await reader.hears("workers")


async def test_a_stream_ends_when_its_key_is_revoked(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    http = two[0]
    revoked, headers = await make_key(services, *Scope)
    _, others = await make_key(services, *Scope)
    async with reading(http, headers) as reader, reading(http, others) as other:
        await revoke_stored_key(services.database, revoked, by=None, request_id=None)
        await reader.until(lambda: reader.is_over)
        await other.hears("keys")
        assert not other.is_over
    assert (await http.get(PATH, headers=headers)).status_code == 401


async def test_the_stream_of_a_chat_ends_too_when_its_key_is_revoked(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    revoked, headers = await make_key(services)
    _, others = await make_key(services)
    path = f"/api/v1/chats/{CHAT}/events"
    async with (
        two[0].stream("GET", path, headers=headers, timeout=WAIT_SECONDS) as ends,
        two[0].stream("GET", path, headers=others, timeout=WAIT_SECONDS) as stays,
    ):
        await revoke_stored_key(services.database, revoked, by=None, request_id=None)
        async for _ in ends.aiter_bytes():
            pass
        await write(services, CHAT, "turn.started")
        async for chunk in stays.aiter_bytes():
            if b"event: turn.started" in chunk:
                break


async def test_a_stream_of_the_local_key_goes_on_when_another_key_is_made_or_revoked(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    async with reading(two[0]) as reader:
        revoked, headers = await make_key(services)
        async with reading(two[0], headers) as other:
            await revoke_stored_key(services.database, revoked, by=None, request_id=None)
            await other.until(lambda: other.is_over)
        await write(services, CHAT, "turn.started")
        await reader.hears("turns", CHAT)
        assert not reader.is_over


async def test_a_reader_that_reconnects_gets_what_it_missed_and_elsewhere_a_reset(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    one, other = two
    async with reading(one) as first:
        await write(services, CHAT, "message.received")
        await first.hears("chats", CHAT)
        async with reading(one) as stays:
            position = first.last_id
            await write(services, "other", "turn.started", "turn.ended")
            await stays.hears("turns", "other")
    async with reading(one, after=position) as back:
        assert back.seen == [("turns", "other")]
    for http, after in ((other, position), (one, "0123456789abcdef.1"), (one, "nonsense"), (one, "")):
        async with reading(http, after=after) as reader:
            assert reader.seen[0] == ("reset", None)


async def test_a_decision_changes_the_approvals_and_the_turn_that_waited(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    async with reading(two[0]) as reader:
        await write(services, CHAT, "approval.decided")
        await reader.hears("approvals", CHAT)
        await reader.hears("turns", CHAT)


async def test_announcements_that_were_missed_are_a_reset(fresh_fleet: Fleet, services: Services) -> None:
    app = create_app(fresh_fleet.settings)
    async with served(app) as http, reading(http) as reader:
        position = reader.last_id
        del reader.seen[:]
        app.state.hub._announcements._subscription._link.abort()  # as in an outage of the broker
        await reader.hears("reset")
        async with reading(http, after=position) as back:
            assert back.seen[0] == ("reset", None)


async def test_events_that_the_database_lost_are_a_reset(fresh_fleet: Fleet, services: Services) -> None:
    app = create_app(fresh_fleet.settings)
    events = f"/api/v1/chats/{CHAT}/events"
    async with served(app) as http, reading(http) as reader, http.stream("GET", events):
        await eventually(lambda: app.state.hub.readers == 1, what="the reader of events")
        await write(services, CHAT, "message.received")
        await reader.hears("chats", CHAT)
        del reader.seen[:]
        async with services.database.begin() as tx:
            for change in ("DELETE FROM chat_events", "UPDATE chats SET last_event = 0"):
                await tx.connection.exec_driver_sql(f"{change} WHERE chat_key = '{CHAT}'")
        await reader.hears("reset")
        # The number of the lost event is given again.
        await write(services, CHAT, "message.received")
        await reader.hears("chats", CHAT)


@pytest.mark.extended
async def test_events_whose_announcement_was_lost_are_found(
    fresh_fleet: Fleet, services: Services, two: tuple[httpx.AsyncClient, httpx.AsyncClient]
) -> None:
    async with reading(two[0]) as reader:
        async with services.database.begin() as tx:
            tx.events.add(CHAT, NewEvent(type="message.received"))  # not announced
        await reader.hears("chats", CHAT)


@pytest.mark.extended
async def test_a_lost_announcement_is_found_though_a_later_event_was_announced(
    services: Services, two: tuple[httpx.AsyncClient, httpx.AsyncClient]
) -> None:
    async with reading(two[0]) as reader:
        async with services.database.begin() as tx:
            tx.events.add(CHAT, NewEvent(type="job.started"))  # not announced
        await write(services, CHAT, "message.received")
        await reader.hears("chats", CHAT)
        await reader.hears("jobs", CHAT)
        # Only what was lost is sent again.
        await write(services, "other", "turn.started")
        await reader.hears("turns", "other")
        # The search for lost events, every 5 s, may find the first one before the second is announced.
        assert sorted(reader.seen[1:3]) == [("chats", CHAT), ("jobs", CHAT)]
        assert reader.seen[3:] == [("turns", "other")]


async def test_a_ticket_reads_changes_and_nothing_else(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    http, other = two
    _, key = await make_key(services, *Scope)
    made = await http.post("/api/v1/stream-tickets", json={"chat_key": None}, headers=key)
    assert made.status_code == 201, made.text
    path = made.json()["path"]
    async with reading(other, path=path) as reader:
        await write(services, CHAT, "turn.started")
        await reader.hears("turns", CHAT)
        # Like tickets of chats, it gives what the scope read does.
        assert {kind for kind, _ in reader.seen} <= {"reset", "turns", "jobs", "approvals", "chats"}
    ticket = path.partition("?")[2]
    assert await without(http, f"/api/v1/chats/{CHAT}/events?{ticket}") == 401
    assert await without(http, f"/api/v1/jobs?{ticket}") == 401
    of_chat = await http.post("/api/v1/stream-tickets", json={"chat_key": CHAT}, headers=key)
    assert await without(http, f"{PATH}?ticket={of_chat.json()['ticket']}") == 401


async def test_its_streams_count_against_the_limits(fresh_fleet: Fleet, services: Services) -> None:
    _, key = await make_key(services)
    gateway = fresh_fleet.settings.gateway.model_copy(update={"streams_per_key": 1})
    app = create_app(fresh_fleet.settings.model_copy(update={"gateway": gateway}))
    async with served(app) as http, reading(http, key):
        refused = await http.get(PATH, headers=key)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")


async def test_both_clients_read_changes(
    two: tuple[httpx.AsyncClient, httpx.AsyncClient], services: Services
) -> None:
    url = str(two[0].base_url)
    key = two[0].headers["Authorization"].removeprefix("Bearer ")
    async with AsyncClient(url, key) as client, client.changes() as changes:
        assert (await anext(changes)).kind == ChangeKind.RESET
        await write(services, CHAT, "job.started")
        async with asyncio.timeout(WAIT_SECONDS):
            async for change in changes:
                if (change.kind, change.chat_key) == ("jobs", CHAT):
                    break

    def read() -> list[str]:
        with Client(url, key) as client, client.changes() as changes:
            kinds = [next(changes).kind]
            client.chat(CHAT).send("hello", user_id="ada")
            while kinds[-1] != "chats":
                kinds.append(next(changes).kind)
            return kinds

    assert (await asyncio.to_thread(read))[0] == ChangeKind.RESET


def test_a_reader_that_takes_nothing_keeps_each_hint_once_and_at_most_a_bounded_number() -> None:
    reader = ChangeReader(Identity(key_id=None, scopes=frozenset({Scope.READ})))
    for _ in range(1_000):
        reader.add([Hint(ChangeKind.CHATS, CHAT), Hint(ChangeKind.KEYS)])
    assert reader.take("e.1").count(b"data:") == 1
    assert reader.take("e.1") == b""
    reader.add(Hint(ChangeKind.CHATS, str(number)) for number in range(5_000))
    taken = reader.take("e.2")
    assert taken.count(b"data:") == 1 and b"event: reset" in taken and b"id: e.2" in taken
