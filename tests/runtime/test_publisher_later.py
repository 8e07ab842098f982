"""Events whose publication is delayed in favour of other messages."""

from __future__ import annotations

import asyncio

import pytest
from waiting import eventually

from broker_config.app import create_app
from broker_config.settings import Settings
from workers.chats import publisher as module
from workers.chats.publisher import EventPublisher


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of events in the order of publication."""
    names: list[str] = []

    def send(_app: object, name: str, _chat_key: str, _body: object) -> None:
        names.append(name)

    monkeypatch.setattr(module, "publish_event", send)
    return names


@pytest.fixture
def publisher() -> EventPublisher:
    return EventPublisher(create_app(Settings.load(env_file=None, broker={"url": "redis://127.0.0.1:1/0"})))


async def test_delayed_events_are_published_in_order(sent: list[str], publisher: EventPublisher) -> None:
    names = [f"event.{number}" for number in range(20)]
    for name in names:
        publisher.tell(name, "chat", {}, later=True)
    assert sent == []
    await eventually(lambda: len(sent) == len(names), what="the events")
    assert sent == names
    publisher.close()


@pytest.fixture
def far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep delayed events from becoming due."""
    monkeypatch.setattr(module, "DEFER_SECONDS", 600)


@pytest.mark.usefixtures("far_off")
async def test_closing_publishes_the_delayed_events(sent: list[str], publisher: EventPublisher) -> None:
    await publisher.event("one", "chat", {}, later=True)
    await publisher.event("two", "chat", {}, later=True)
    await asyncio.to_thread(publisher.close)
    assert sent == ["one", "two"]


@pytest.mark.usefixtures("far_off")
async def test_the_number_of_delayed_events_is_bounded(sent: list[str], publisher: EventPublisher) -> None:
    for _ in range(module._MOST_LATER):
        await publisher.event("put off", "chat", {}, later=True)
    await publisher.event("at once", "chat", {}, later=True)
    assert sent == ["at once"]
    await asyncio.to_thread(publisher.close)
