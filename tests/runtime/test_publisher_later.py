"""Events whose publication is delayed, coalesced or dropped in favour of other messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from waiting import WAIT_SECONDS, eventually

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.app.chats import publisher as module
from nekro.app.chats.publisher import EventPublisher


class Sent(list[tuple[str, int]]):
    """Chats and numbers in the order of publication; ``gate`` holds publications up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def added(self, chat_key: str, number: int, _types: frozenset[str] = frozenset()) -> None:
        assert self.gate.wait(WAIT_SECONDS)
        self.append((chat_key, number))

    def live(self, chat_key: str, event: Mapping[str, Any]) -> None:
        self.added(chat_key, event["number"])

    def close(self) -> None:
        """There is no connection."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    sent = Sent()
    monkeypatch.setattr(module, "Announcer", lambda _: sent)
    return sent


@pytest.fixture
def publisher(sent: Sent) -> EventPublisher:
    return EventPublisher(create_app(Settings.load(env_file=None, broker={"url": "redis://127.0.0.1:1/0"})))


async def test_delayed_events_are_published_in_order(sent: Sent, publisher: EventPublisher) -> None:
    for number in range(20):
        publisher.events_added(f"chat{number}", number, later=True)
    assert sent == []
    await eventually(lambda: len(sent) == 20, what="the events")
    assert sent == [(f"chat{number}", number) for number in range(20)]
    publisher.close()


async def test_only_the_newest_number_of_a_chat_is_published(sent: Sent, publisher: EventPublisher) -> None:
    sent.gate.clear()
    for number in range(1, 50):
        publisher.events_added("chat", number)
    sent.gate.set()
    await eventually(lambda: ("chat", 49) in sent, what="the newest number")
    # Two threads had begun with older ones, and wait at the gate.
    assert len(sent) <= 3
    publisher.events_added("chat", 50)
    await eventually(lambda: ("chat", 50) in sent, what="a number after the last publication")
    publisher.close()


async def test_live_events_are_dropped_while_too_many_wait(sent: Sent, publisher: EventPublisher) -> None:
    sent.gate.clear()
    taken = [publisher.live("chat", {"number": number}) for number in range(module._MOST_LIVE + 20)]
    assert not taken[-1] and sum(taken) >= module._MOST_LIVE
    sent.gate.set()
    await eventually(lambda: len(sent) == sum(taken), what="the live events that were not dropped")
    assert publisher.live("chat", {"number": 0})
    await asyncio.to_thread(publisher.close)


@pytest.fixture
def far_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep delayed events from becoming due."""
    monkeypatch.setattr(module, "DEFER_SECONDS", 600)


@pytest.mark.usefixtures("far_off")
async def test_closing_publishes_the_delayed_events(sent: Sent, publisher: EventPublisher) -> None:
    publisher.events_added("one", 1, later=True)
    publisher.events_added("two", 1, later=True)
    publisher.events_added("two", 2, later=True)
    await asyncio.to_thread(publisher.close)
    assert sent == [("one", 1), ("two", 2)]


@pytest.mark.usefixtures("far_off")
async def test_the_number_of_delayed_events_is_bounded(sent: Sent, publisher: EventPublisher) -> None:
    for number in range(module._MOST_LATER):
        publisher.events_added(f"put off {number}", 1, later=True)
    publisher.events_added("at once", 1, later=True)
    await eventually(lambda: sent == [("at once", 1)], what="the event that could not be put off")
    await asyncio.to_thread(publisher.close)
    assert len(sent) == module._MOST_LATER + 1
