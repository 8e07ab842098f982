"""Events whose announcement is delayed, coalesced or dropped, and delayed requests, on a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually

from broker_config.app import create_app
from broker_config.redis_library import redis
from broker_config.settings import Settings
from broker_config.topology import rounds_waiting
from nekro.app.chats import publisher as module
from nekro.app.chats.publisher import EventPublisher
from nekro.base.loop_thread import LoopThread
from nekro.broker.announcements import MOST_LIVE


@pytest.fixture
def settings(make_settings: Callable[..., Settings], own_redis: Any) -> Settings:
    return make_settings(broker={"url": own_redis.url})


@pytest.fixture
def client(own_redis: Any) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


class Channel:
    """What is published on the channel of announcements, in order."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        self._client = client
        self._subscription = client.pubsub()
        self._subscription.subscribe(f"{settings.broker.key_prefix}events")
        assert self._subscription.get_message(timeout=WAIT_SECONDS)["type"] == "subscribe"
        self._numbers: list[tuple[str, int]] = []

    @property
    def numbers(self) -> list[tuple[str, int]]:
        """Chats and numbers so far."""
        while (message := self._subscription.get_message()) is not None:
            body = json.loads(message["data"])["body"]
            self._numbers.append((body["chat_key"], body["number"]))
        return self._numbers

    def pause(self) -> None:
        """Let Redis publish nothing, until ``resume``."""
        self._client.client_pause(int(WAIT_SECONDS * 1000), all=False)

    def resume(self) -> None:
        self._client.client_unpause()


@pytest.fixture
def channel(client: redis.Redis, settings: Settings) -> Iterator[Channel]:
    channel = Channel(client, settings)
    yield channel
    channel.resume()
    channel._subscription.close()


@pytest.fixture
async def publisher(settings: Settings) -> Any:
    publisher = EventPublisher(create_app(settings))
    yield publisher
    await publisher.close()


async def on_its_way(publisher: EventPublisher) -> None:
    """Wait until what was announced has been sent to Redis."""
    (outbox,) = publisher._announcer._outboxes.values()
    await eventually(lambda: not outbox._waiting and outbox._link._open, what="the announcements to be sent")


async def test_delayed_events_are_announced_in_order(channel: Channel, publisher: EventPublisher) -> None:
    for number in range(20):
        publisher.events_added(f"chat{number}", number, later=True)
    assert channel.numbers == []
    await eventually(lambda: len(channel.numbers) == 20, what="the events")
    assert channel.numbers == [(f"chat{number}", number) for number in range(20)]


async def test_only_the_newest_number_of_a_chat_is_announced(
    channel: Channel, publisher: EventPublisher
) -> None:
    channel.pause()
    publisher.events_added("chat", 1)
    await on_its_way(publisher)
    for number in range(2, 50):
        publisher.events_added("chat", number)
        await asyncio.sleep(0)
    assert channel.numbers == []
    channel.resume()
    await eventually(lambda: len(channel.numbers) == 2, what="the newest number")
    publisher.events_added("chat", 50)
    await eventually(lambda: len(channel.numbers) == 3, what="a number after the last announcement")
    assert channel.numbers == [("chat", 1), ("chat", 49), ("chat", 50)]


async def test_live_events_are_dropped_while_too_many_wait(
    channel: Channel, publisher: EventPublisher
) -> None:
    channel.pause()
    publisher.live("chat", {"number": -1})
    await on_its_way(publisher)
    taken = [publisher.live("chat", {"number": number}) for number in range(MOST_LIVE + 20)]
    assert taken == [True] * MOST_LIVE + [False] * 20
    channel.resume()
    await eventually(lambda: len(channel.numbers) == 1 + MOST_LIVE, what="the events that were not dropped")
    assert publisher.live("chat", {"number": MOST_LIVE})
    await eventually(lambda: len(channel.numbers) == 2 + MOST_LIVE, what="the event after them")
    assert channel.numbers == [("chat", number) for number in range(-1, MOST_LIVE + 1)]


async def test_a_failure_is_logged_and_later_events_are_announced(
    own_redis: Any, settings: Settings, publisher: EventPublisher, logged: list[Any]
) -> None:
    publisher.events_added("chat", 1)
    await on_its_way(publisher)
    own_redis.kill()
    publisher.events_added("chat", 2)
    await eventually(lambda: "announcement_not_published" in dict(logged), what="the failure in the log")
    own_redis.start()
    with redis.Redis.from_url(own_redis.url) as client:
        channel = Channel(client, settings)
        publisher.events_added("chat", 3)
        await eventually(lambda: channel.numbers == [("chat", 3)], what="the later event")


@pytest.fixture
def far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is delayed from becoming due."""
    monkeypatch.setattr(module, "DEFER_SECONDS", 600)


@pytest.mark.usefixtures("far_off")
async def test_closing_announces_the_delayed_events(channel: Channel, publisher: EventPublisher) -> None:
    publisher.events_added("one", 1, later=True)
    publisher.events_added("two", 1, later=True)
    publisher.events_added("two", 2, later=True)
    await publisher.close()
    await eventually(lambda: channel.numbers == [("one", 1), ("two", 2)], what="both announcements")
    publisher.events_added("one", 2)
    assert not publisher.live("one", {"number": 3})
    await asyncio.sleep(0.05)
    assert len(channel.numbers) == 2, "nothing is announced after the end"


@pytest.mark.usefixtures("far_off")
async def test_the_end_of_a_loop_announces_what_waits_and_closes_its_connection(
    channel: Channel, publisher: EventPublisher, client: redis.Redis
) -> None:
    async def add() -> None:
        publisher.events_added("other", 2, later=True)
        publisher.events_added("other", 1, later=True)

    thread = LoopThread("other")
    thread.start()
    asyncio.run_coroutine_threadsafe(add(), thread.loop).result(WAIT_SECONDS)
    assert channel.numbers == []
    await asyncio.to_thread(thread.stop)
    await eventually(lambda: channel.numbers == [("other", 2)], what="the announcement")
    await eventually(lambda: "publish" not in last_commands(client), what="the end of the connection")


def last_commands(client: redis.Redis) -> list[str]:
    """The last command of each connection."""
    return [connection["cmd"] for connection in client.client_list()]


@pytest.mark.usefixtures("far_off")
async def test_the_number_of_delayed_requests_is_bounded(settings: Settings) -> None:
    app = create_app(settings)
    publisher = EventPublisher(app)
    for number in range(module._MOST_LATER):
        await publisher.round_requested(f"put off {number}", later=True)
    await publisher.round_requested("at once", later=True)
    assert await asyncio.to_thread(rounds_waiting, app) == 1
    await publisher.close()
    assert await asyncio.to_thread(rounds_waiting, app) == module._MOST_LATER + 1
