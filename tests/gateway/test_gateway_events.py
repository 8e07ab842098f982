"""The event stream of a chat over HTTP: resumption, filters, live events, lost announcements."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from event_reader import Frame, frames
from gateway_server import served
from mcp.server.subscriptions import InMemorySubscriptionBus, ResourceUpdated
from test_gateway_keys import key_of
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from nekro.app import use_cases
from nekro.app.chats.events import record
from nekro.app.services import Services
from nekro.extensions.mcp.server.subscriptions import ListeningClients
from nekro.gateway.access import limits
from nekro.gateway.app import create_app
from nekro.gateway.streams import events as channels
from nekro.gateway.streams import hub as hubs
from nekro.gateway.streams.events import Position, StreamEvent
from nekro.gateway.streams.hub import EventHub, EventsLostError, SlowReaderError
from nekro.gateway.streams.turns import turn_end, turn_events
from nekro.operations.actor import Scope
from nekro_agent.errors import NotFoundError
from nekro_client.event_types import EventType
from nekro_client.models import Event
from storage.repositories.events import NewEvent
from workers.rounds.ledger import RoundLedger


@pytest.fixture
async def services(fleet: Fleet) -> AsyncIterator[Services]:
    """Another process of the fleet, as far as the gateway can tell."""
    services = fleet.services()
    await services.start()
    yield services
    await services.close()


@pytest.fixture
async def chat(services: Services) -> str:
    chat_key = f"chat-{uuid.uuid4().hex}"
    async with services.database.begin() as tx:
        await tx.chats.ensure(chat_key)
    return chat_key


@pytest.fixture
async def hub(services: Services) -> AsyncIterator[EventHub]:
    hub = EventHub(services.settings, services.database, publisher=services.publisher)
    hub.start()
    yield hub
    await hub.close()


async def add(services: Services, chat_key: str, count: int = 1, *, kind: str = "call.ended") -> None:
    """Add events as a worker does."""
    async with services.database.begin() as tx:
        events = [NewEvent(type=kind, turn_id="t", data={"n": n}) for n in range(count)]
        record(tx, services.publisher, chat_key, *events)


async def take(response: httpx.Response, count: int) -> list[Frame]:
    """Return the next frames."""
    found: list[Frame] = []
    async with asyncio.timeout(WAIT_SECONDS), aclosing(frames(response)) as stream:  # type: ignore[type-var]
        async for frame in stream:
            found.append(frame)
            if len(found) == count:
                return found
    raise AssertionError(f"the stream ended after {found}")


def path(chat_key: str) -> str:
    return f"/api/v1/chats/{chat_key}/events"


async def test_a_stream_resumes_after_a_number_and_goes_on_live(
    fleet: Fleet, services: Services, chat: str
) -> None:
    await add(services, chat, 5)
    app = create_app(fleet.settings)
    async with served(app) as client:
        async with client.stream("GET", path(chat), params={"after": 2}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            old = asyncio.create_task(take(response, 6))
            await eventually(lambda: app.state.hub.readers == 1, what="the reader")
            await add(services, chat, 3)
            got = await old
        assert [frame.id for frame in got] == [3, 4, 5, 6, 7, 8]
        assert got[0].event == "call.ended"
        assert got[0].data["number"] == 3 and got[0].data["chat_key"] == chat
        assert got[0].data["turn_id"] == "t" and got[0].data["data"] == {"n": 2}
        # The header of a browser that connects again counts, not the number in its URL.
        headers = {"Last-Event-ID": "7"}
        async with client.stream("GET", path(chat), params={"after": 0}, headers=headers) as response:
            assert [frame.id for frame in await take(response, 1)] == [8]


async def test_without_a_number_a_stream_begins_with_the_next_event(
    fleet: Fleet, services: Services, chat: str
) -> None:
    await add(services, chat, 5)
    app = create_app(fleet.settings)
    async with served(app) as client, client.stream("GET", path(chat)) as response:
        await eventually(lambda: app.state.hub.readers == 1, what="the reader")
        await add(services, chat)
        assert [frame.id for frame in await take(response, 1)] == [6]


async def test_a_stream_is_filtered_by_type(fleet: Fleet, services: Services, chat: str) -> None:
    for kind in ("call.started", "message.sent", "call.ended", "turn.ended"):
        await add(services, chat, kind=kind)
    query = {"after": 0, "types": "message.sent, turn.ended"}
    async with (
        served(create_app(fleet.settings)) as client,
        client.stream("GET", path(chat), params=query) as response,
    ):
        assert [(frame.id, frame.event) for frame in await take(response, 2)] == [
            (2, "message.sent"),
            (4, "turn.ended"),
        ]


async def test_live_events_have_no_number_and_can_be_left_out(
    fleet: Fleet, services: Services, chat: str
) -> None:
    app = create_app(fleet.settings)
    async with (
        served(app) as client,
        client.stream("GET", path(chat)) as with_live,
        client.stream("GET", path(chat), params={"live": False}) as without,
    ):
        await eventually(lambda: app.state.hub.readers == 2, what="the readers")
        body = {
            "type": "model.delta",
            "at": "2026-01-01T00:00:00+00:00",
            "turn_id": "t",
            "data": {"text": "x"},
        }

        def publish() -> bool:
            return services.publisher.live(chat, body)

        # The gateway's queue may not be bound yet, and live events are not kept.
        first = asyncio.create_task(take(with_live, 1))
        await eventually(lambda: publish() and first.done(), what="the live event")
        (frame,) = await first
        assert (frame.id, frame.event, frame.data["number"]) == (None, "model.delta", None)
        assert frame.data["data"] == {"text": "x"} and frame.data["turn_id"] == "t"
        await add(services, chat)
        assert [frame.id for frame in await take(without, 1)] == [1]


async def test_live_events_of_other_releases_are_ignored(
    services: Services, hub: EventHub, chat: str
) -> None:
    got: list[Any] = []

    async def read() -> None:
        async for event in hub.stream(chat):
            got.append(event.event)
            if event.number:
                return

    reader = asyncio.create_task(read())
    await eventually(lambda: hub.readers == 1, what="the reader")
    assert await hub.listening()
    for body in (
        {"type": "unknown.kind", "data": {}},
        {"type": "model.delta"},
        {"type": "model.delta", "data": {}, "turn_id": 5},
        {"type": "model.delta", "data": {"n": 1}, "at": "soon"},
    ):
        services.publisher.live(chat, body)
    await add(services, chat)
    await reader
    assert [event.data for event in got] in ([{"n": 0}], [{"n": 1}, {"n": 0}])


async def test_the_first_reader_gets_what_came_before_its_subscription(
    services: Services, chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn in words may be over before the subscription of the only reader is there."""
    monkeypatch.setattr(hubs, "FRESH_SECONDS", 3600)  # the check that would find the event all the same
    hub = EventHub(services.settings, services.database, publisher=services.publisher)
    hub.start()
    may_subscribe, subscription = asyncio.Event(), hub._announcements._subscription
    listen = subscription.listen

    async def listen_later() -> None:
        await may_subscribe.wait()
        await listen()

    monkeypatch.setattr(subscription, "listen", listen_later)
    try:
        reading = asyncio.ensure_future(anext(hub.stream(chat)))
        await eventually(lambda: hub.readers == 1, what="the reader")
        async with services.database.begin() as tx:
            await tx.events.append(chat, [NewEvent(type="call.ended", turn_id="t", data={"n": 7})])
        may_subscribe.set()
        assert (await asyncio.wait_for(reading, WAIT_SECONDS)).event.data == {"n": 7}
    finally:
        may_subscribe.set()
        await hub.close()


async def test_a_reader_catches_up_with_more_than_the_ring_holds(
    services: Services, hub: EventHub, chat: str
) -> None:
    total = 2 * channels.RING + 17
    for _ in range(total // 500):
        await add(services, chat, 500)
    await add(services, chat, total % 500)
    numbers: list[int | None] = []
    async with aclosing(hub.stream(chat, after=0)) as stream:
        async for event in stream:
            numbers.append(event.number)
            if len(numbers) == total:
                await add(services, chat)
            if len(numbers) == total + 1:
                break
    assert numbers == list(range(1, total + 2))


def test_a_ring_keeps_fewer_events_if_their_texts_are_long() -> None:
    channel = channels.ChatRing("c", newest=Position(0))

    def add_text(number: int, chars: int) -> None:
        data = {"text": "a" * chars}
        event = Event.model_construct(number=number, type="message.sent", chat_key="c", at=None, data=data)
        channel.add([(number, StreamEvent(event))])

    for number in range(1, 21):
        add_text(number, 1 << 20)
    assert (channel.oldest, channel.newest) == (12, 20)
    assert not channel.has(11) and [event.number for event in channel.after(12)] == list(range(13, 21))
    add_text(21, 100 << 20)
    assert [event.number for event in channel.after(20)] == [21]
    for number in range(22, 25):
        add_text(number, 1)
    assert [event.number for event in channel.after(21)] == [22, 23, 24]


async def test_texts_that_utf_8_cannot_encode_do_not_end_a_stream(
    fleet: Fleet, services: Services, chat: str
) -> None:
    """Plugins send such texts, and a program can print them."""
    message_id = await use_cases.receive_message(
        services, chat, "a\ud800\u2028\r\nid: 7", user_id="u", user_name="U"
    )
    async with (
        served(create_app(fleet.settings)) as client,
        client.stream("GET", path(chat), params={"after": 0}) as response,
    ):
        received, started = await take(response, 2)
        turn = await client.get(f"/api/v1/turns/{started.data['turn_id']}")
    assert received.data["data"]["text"] == "a\ud800\u2028\r\nid: 7"
    assert (received.id, started.id) == (1, 2)
    assert [item["id"] for item in turn.json()["messages"]] == [message_id]


async def test_a_slow_reader_is_ended_and_does_not_slow_others(
    services: Services, hub: EventHub, chat: str
) -> None:
    slow = hub.stream(chat, after=0)
    begun = asyncio.ensure_future(anext(slow))
    await eventually(lambda: hub.readers == 1, what="the slow reader")
    await add(services, chat)
    first = await begun
    quick: list[int | None] = []

    async def read() -> None:
        async for event in hub.stream(chat, after=0):
            quick.append(event.number)

    reader = asyncio.create_task(read())
    total = channels.RING + 300
    for _ in range(total // 100):
        await add(services, chat, 100)
    await eventually(lambda: len(quick) == total + 1, what="the quick reader")
    assert quick == list(range(1, total + 2))
    with pytest.raises(SlowReaderError):
        async for _ in slow:
            pass
    reader.cancel()
    # It resumes after its last number.
    async with aclosing(hub.stream(chat, after=first.number)) as again:
        assert (await anext(again)).number == 2


async def test_events_whose_announcement_was_lost_are_found(
    services: Services, hub: EventHub, chat: str
) -> None:
    stream = hub.stream(chat, after=0)
    reading = asyncio.ensure_future(anext(stream))
    await eventually(lambda: hub.readers == 1, what="the reader")
    async with services.database.begin() as tx:
        tx.events.add(chat, NewEvent(type="call.ended"))
    assert (await reading).number == 1
    await stream.aclose()
    assert hub.readers == 0


async def test_an_mcp_client_that_hears_of_lost_events_also_hears_of_those_after_it(
    services: Services, hub: EventHub, chat: str
) -> None:
    heard = 0

    class Bus(InMemorySubscriptionBus):
        async def publish(self, event: object) -> None:
            nonlocal heard
            heard += 1
            if heard == 2:  # the client reads the history now; this comes after it
                await add(services, chat)

    changes = ListeningClients(services, hub, lambda _: pytest.fail("no client asks"))
    await add(services, chat)
    update = ResourceUpdated(uri=f"nekro://chats/{chat}/messages")
    following = asyncio.create_task(changes._follow(chat, 1, (), Bus(), update))
    await eventually(lambda: hub.readers == 1, what="the reader")
    await add(services, chat)
    await eventually(lambda: heard == 1, what="the new event")
    async with services.database.begin() as tx:
        for change in ("DELETE FROM chat_events", "UPDATE chats SET last_event = 0"):
            await tx.connection.exec_driver_sql(f"{change} WHERE chat_key = '{chat}'")
    await eventually(lambda: heard == 3, what="the event after the loss")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_the_end_of_the_hub_ends_its_streams(services: Services, chat: str) -> None:
    hub = EventHub(services.settings, services.database, publisher=services.publisher)
    hub.start()
    reading = asyncio.ensure_future(anext(hub.stream(chat), None))
    await eventually(lambda: hub.readers == 1, what="the reader")
    await hub.close()
    assert await reading is None


async def test_a_gateway_refuses_more_streams_than_it_may_have(
    fleet: Fleet, chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MOST_STREAMS", 1)
    app = create_app(fleet.settings)
    async with served(app) as client:
        async with client.stream("GET", path(chat)):
            await eventually(lambda: app.state.hub.readers == 1, what="the reader")
            refused = await client.get(path(chat))
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        await eventually(lambda: app.state.hub.readers == 0, what="the end of the stream")


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ({"after": -1}, {}),
        ({"after": "x"}, {}),
        ({"after": 1 << 63}, {}),
        ({"types": "message.sent,nothing"}, {}),
        ({"live": "maybe"}, {}),
        ({}, {"Last-Event-ID": "x"}),
        ({}, {"Last-Event-ID": "-1"}),
        ({}, {"Last-Event-ID": "9" * 20}),
        ({}, {"Last-Event-ID": "1" * 21}),
        ({}, {"Last-Event-ID": "1."}),
        ({}, {"Last-Event-ID": "1.0000000G"}),
    ],
)
async def test_wrong_positions_and_filters_are_refused(
    fleet: Fleet, query: dict[str, Any], headers: dict[str, str]
) -> None:
    async with served(create_app(fleet.settings)) as client:
        answer = await client.get(path("chat"), params=query, headers=headers)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_number_that_the_chat_has_not_reached_counts_as_its_newest(
    services: Services, hub: EventHub, chat: str
) -> None:
    await add(services, chat, 3)
    reading = asyncio.ensure_future(anext(hub.stream(chat, after=99)))
    await eventually(lambda: hub.readers == 1, what="the reader")
    await add(services, chat)
    assert (await reading).number == 4


async def lose(services: Services, chat_key: str, *, after: int) -> None:
    """Forget events, as a standby does that takes over before it has received them."""
    async with services.database.begin() as tx:
        await tx.connection.exec_driver_sql(
            f"DELETE FROM chat_events WHERE chat_key = '{chat_key}' AND number > {after}"
        )
        await tx.connection.exec_driver_sql(
            f"UPDATE chats SET last_event = {after} WHERE chat_key = '{chat_key}'"
        )


@pytest.mark.parametrize("added", [0, 2, 3])
async def test_a_reader_of_lost_events_reads_the_chat_again(
    fleet: Fleet, services: Services, chat: str, added: int
) -> None:
    """The numbers of the lost events are given to others: not yet, as many, or more."""
    await add(services, chat, 3)
    app = create_app(fleet.settings)
    async with served(app) as client:
        async with client.stream("GET", path(chat), params={"types": "message.sent"}) as other:
            await eventually(lambda: app.state.hub.readers == 1, what="the reader")
            await add(services, chat, 2)
            async with client.stream("GET", path(chat), params={"after": 2}) as response:
                reading = frames(response)
                got = [await anext(reading) for _ in range(3)]
                assert [frame.id for frame in got] == [3, 4, 5]
                await lose(services, chat, after=3)
                if added:
                    await add(services, chat, added, kind="message.noted")
                (lost,) = [frame async for frame in reading]
            assert (lost.event, lost.id, lost.last_id) == ("events.lost", 0, "0")
            assert lost.data["data"] == {"after": 0} and lost.data["number"] is None
            # Also to readers of other types of events.
            assert [frame.event async for frame in frames(other)] == ["events.lost"]
        await eventually(lambda: app.state.hub.readers == 0, what="the end of the streams")
        await add(services, chat, kind="message.noted")
        headers = {"Last-Event-ID": lost.last_id}
        async with client.stream("GET", path(chat), headers=headers) as response:
            again = await take(response, 3 + added + 1)
    assert [frame.id for frame in again] == list(range(1, 5 + added))
    assert {frame.event for frame in again[3:]} == {"message.noted"}


async def test_readers_of_live_events_outlast_a_loss_of_kept_ones(
    services: Services, hub: EventHub, chat: str
) -> None:
    await add(services, chat)
    async with hub.live(chat) as reader:
        with pytest.raises(EventsLostError):
            async for _ in hub.stream(chat, after=0):
                await lose(services, chat, after=0)
        body = {"type": "model.delta", "at": "2026-01-01T00:00:00+00:00", "data": {"text": "x"}}
        await eventually(lambda: services.publisher.live(chat, body) and reader.live, what="the live event")
    assert hub.readers == 0


@pytest.mark.parametrize("added", [0, 3])
async def test_a_client_that_reconnects_with_a_lost_event_gets_events_lost(
    fleet: Fleet, services: Services, chat: str, added: int
) -> None:
    await add(services, chat, 5)
    async with (
        served(create_app(fleet.settings)) as client,
        client.stream("GET", path(chat), params={"after": 0}) as response,
    ):
        got = await take(response, 5)
    await lose(services, chat, after=3)
    if added:
        await add(services, chat, added)
    async with served(create_app(fleet.settings)) as client:
        async with client.stream("GET", path(chat), headers={"Last-Event-ID": got[4].last_id}) as response:
            (lost,) = [frame async for frame in frames(response)]
        assert (lost.event, lost.last_id, lost.data["data"]) == ("events.lost", "0", {"after": 0})
        await add(services, chat)
        # One that the database still has counts.
        async with client.stream("GET", path(chat), headers={"Last-Event-ID": got[2].last_id}) as response:
            assert [frame.id for frame in await take(response, added + 1)] == list(range(4, 5 + added))


async def test_a_position_whose_event_has_expired_counts(fleet: Fleet, services: Services, chat: str) -> None:
    await add(services, chat, 3)
    async with served(create_app(fleet.settings)) as client:
        async with client.stream("GET", path(chat), params={"after": 0}) as response:
            got = await take(response, 3)
        async with services.database.begin() as tx:
            await tx.connection.exec_driver_sql(f"DELETE FROM chat_events WHERE chat_key = '{chat}'")
        await add(services, chat)
        async with client.stream("GET", path(chat), headers={"Last-Event-ID": got[1].last_id}) as response:
            assert [frame.id for frame in await take(response, 1)] == [4]


async def turn(services: Services, chat_key: str, text: str) -> str:
    """Post a message; returns the id of its turn."""
    message_id = await use_cases.receive_message(services, chat_key, text, user_id="u", user_name="U")
    async with services.database.read() as tx:
        message = await tx.messages.find(str(message_id))
    assert message is not None and message.turn_id is not None
    return message.turn_id


async def test_the_end_of_a_turn_is_awaited(services: Services, hub: EventHub) -> None:
    chat_key = f"turns-{uuid.uuid4().hex}"
    turn_id = await turn(services, chat_key, "hello")
    assert await turn_end(hub, services.database, turn_id, seconds=0.05) is None
    waiting = asyncio.create_task(turn_end(hub, services.database, turn_id, seconds=60))
    await eventually(lambda: hub.readers == 1, what="the reader")
    await services.stopper.stop(chat_key, reason="enough", wait_seconds=0, turn_id=turn_id)
    end = await waiting
    assert end is not None and end.type == EventType.TURN_ENDED and end.data == {"state": "cancelled"}
    # Also when it has already ended.
    assert await turn_end(hub, services.database, turn_id, seconds=60) == end
    with pytest.raises(NotFoundError):
        await turn_end(hub, services.database, "unknown", seconds=1)


async def test_the_events_of_a_turn_include_those_of_the_round_that_answers_it(
    services: Services, hub: EventHub
) -> None:
    chat_key = f"merged-{uuid.uuid4().hex}"
    first, second = await turn(services, chat_key, "one"), await turn(services, chat_key, "two")
    async with services.database.begin() as tx:
        fence = await tx.chats.acquire(chat_key, owner="w", lease_seconds=30)
        assert fence is not None
    ledger = RoundLedger(services.database, services.publisher, services.endings, redact=str)
    claimed = await ledger.start_next(chat_key, fence=fence, worker="w")
    assert claimed is not None and [item.turn_id for item in claimed.merged] == [second]
    await services.endings.cancel(chat_key, reason="enough")
    async with services.database.begin() as tx:
        await tx.connection.exec_driver_sql(
            f"UPDATE chats SET lease_until = '2000-01-01 00:00:00.000000' WHERE chat_key = '{chat_key}'"
        )
    await services.stopper.stop(chat_key, reason="enough", wait_seconds=60)
    async with aclosing(turn_events(hub, services.database, second)) as stream:
        got = [(event.event.type, event.event.turn_id) async for event in stream]
    assert got == [
        ("message.received", second),
        ("turn.started", second),
        ("round.started", first),
        ("round.ended", first),
        ("turn.ended", second),
    ]


async def test_turns_are_read_and_cancelled_over_http(fleet: Fleet, services: Services) -> None:
    chat_key = f"http-{uuid.uuid4().hex}"
    one, two = await turn(services, chat_key, "one"), await turn(services, chat_key, "two")
    async with served(create_app(fleet.settings)) as client:
        found = (await client.get(f"/api/v1/turns/{two}")).json()
        assert (found["id"], found["state"], found["chat_key"]) == (two, "waiting", chat_key)
        assert [message["text"] for message in found["messages"]] == ["two"]
        answer = await client.post(f"/api/v1/turns/{two}/cancel")
        assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
        assert (await client.get(f"/api/v1/turns/{one}")).json()["state"] == "waiting"
        # Again has no effect.
        assert (await client.post(f"/api/v1/turns/{two}/cancel")).json()["state"] == "cancelled"
        for missing in (await client.get("/api/v1/turns/x"), await client.post("/api/v1/turns/x/cancel")):
            assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    async with services.database.read() as tx:
        ends = await tx.events.after(chat_key, number=0, limit=100)
    assert [event.turn_id for event in ends if event.type == "turn.ended"] == [two]


async def test_the_answer_to_a_cancellation_shows_no_more_than_its_key_may_read(
    fresh_fleet: Fleet,
) -> None:
    services = fresh_fleet.services()
    await services.start()
    one, two = await turn(services, "c", "one"), await turn(services, "c", "two")
    poster, reader = [await key_of(fresh_fleet, Scope.POST, *more) for more in ((), (Scope.READ,))]
    async with served(create_app(fresh_fleet.settings)) as client:
        for turn_id in (one, one):  # the second time it has ended
            blind = (await client.post(f"/api/v1/turns/{turn_id}/cancel", headers=poster)).json()
            assert (blind["state"], blind["messages"], blind["rounds"]) == ("cancelled", [], [])
        seen = (await client.post(f"/api/v1/turns/{two}/cancel", headers=reader)).json()
        assert [message["text"] for message in seen["messages"]] == ["two"] and len(seen["rounds"]) == 1
    await services.close()
