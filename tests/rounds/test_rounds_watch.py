"""Watching a chat's events: delivery, losses, and clean-up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis

from broker_config.app import create_app
from broker_config.settings import DatabaseSettings, Settings
from broker_config.topology import publish_event, publish_round_requested
from nekro.broker import event_watch as watching
from nekro.broker.event_watch import EventWatcher, drop_abandoned
from nekro.cli.environment import environment_of
from nekro.cli.main import main
from nekro_agent.errors import BrokerUnavailableError
from storage.engine import Database
from storage.repositories.chats import TurnVariables
from storage.repositories.rounds import RoundRequest
from storage.states import TriggerKind
from storage.transaction import Transaction
from workers.ops.sweeper import WatchSweep

T = TypeVar("T")

CHAT = "群/1: x.y#*"


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


def keys(settings: Settings, pattern: str) -> list[bytes]:
    with redis.Redis.from_url(str(settings.broker.url)) as client:
        return sorted(client.scan_iter(f"{settings.broker.key_prefix}{pattern}"))


def test_a_watcher_gets_only_the_events_of_its_chat(settings: Settings) -> None:
    app = create_app(settings)
    publish_event(app, "events.added", CHAT, {"id": "before"})
    with EventWatcher(app, settings.broker, chat_key=CHAT) as watcher:
        publish_event(app, "events.added", CHAT, {"id": "1"})
        publish_event(app, "events.added", f"{CHAT}z", {"id": "2"})
        publish_round_requested(app, CHAT)
        got = [(event.name, dict(event.body)) for event in watcher.poll()]
        assert watcher.poll() == []
    assert got == [("events.added", {"id": "1"}), ("round.requested", {})]
    assert keys(settings, "watch*") == []


def test_an_event_that_is_published_while_its_watcher_ends_leaves_no_queue(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = EventWatcher(create_app(settings), settings.broker, chat_key=CHAT).__enter__()
    queue = f"{settings.broker.key_prefix}watch.{watcher._id}"

    def publish_late(_seconds: float) -> None:
        """A publisher has read the bindings before the watcher deleted its own."""
        with redis.Redis.from_url(str(settings.broker.url)) as client:
            client.lpush(queue, "late")

    monkeypatch.setattr(watching.time, "sleep", publish_late)
    watcher.__exit__(None, None, None)
    assert keys(settings, "watch*") == []


def test_a_watcher_of_all_chats_gets_announcements_and_live_events_only(settings: Settings) -> None:
    app = create_app(settings)
    with EventWatcher(app, settings.broker, chat_key=None) as watcher:
        publish_event(app, "events.added", CHAT, {"number": 1})
        publish_event(app, "events.live", "x" * 500, {"type": "model.delta"})
        publish_round_requested(app, CHAT)
        got = [(event.name, dict(event.body)) for event in watcher.poll()]
    assert got == [("events.added", {"number": 1}), ("events.live", {"type": "model.delta"})]


def test_events_that_a_slow_watcher_does_not_fetch_are_dropped_and_counted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_WAITING", 3)
    monkeypatch.setattr(watching, "RENEWALS", 1e9)
    app = create_app(settings)
    with EventWatcher(app, settings.broker, chat_key=CHAT) as watcher:
        for number in range(5):
            publish_event(app, "events.added", CHAT, {"id": number})
        assert watcher.poll() == []
        assert watcher.dropped == 5
        publish_event(app, "events.added", CHAT, {"id": 6})
        assert [event.body for event in watcher.poll()] == [{"id": 6}]


async def test_the_sweep_deletes_the_queues_of_killed_watchers_only(
    settings: Settings,
) -> None:
    app = create_app(settings)
    killed = EventWatcher(app, settings.broker, chat_key=CHAT).__enter__()
    with EventWatcher(app, settings.broker, chat_key=CHAT) as living:
        publish_event(app, "events.added", CHAT, {"id": 1})
        with redis.Redis.from_url(str(settings.broker.url)) as client:
            client.delete(killed._presence_key)  # as if its time had expired
        seconds = await WatchSweep(app, settings.broker).sweep()
        assert seconds is not None and seconds > 1
        assert len(keys(settings, "watch.*")) == 1
        assert len(await asyncio.to_thread(living.poll)) == 1
        assert drop_abandoned(app, settings.broker) == 0
    assert keys(settings, "watch*") == []


def test_a_watcher_continues_after_redis_lost_its_data(
    make_settings: Callable[..., Settings], own_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(broker={"url": own_redis.url})
    monkeypatch.setattr(watching, "RENEWALS", 1e9)
    app = create_app(settings)
    with EventWatcher(app, settings.broker, chat_key=CHAT) as watcher:
        own_redis.kill()
        with pytest.raises(BrokerUnavailableError):
            watcher.poll()
        own_redis.start()
        watcher.poll()
        publish_event(create_app(settings), "events.added", CHAT, {"id": 1})
        assert [event.body for event in watcher.poll()] == [{"id": 1}]


def test_an_unreachable_broker_is_named(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings(broker={"url": "redis://127.0.0.1:1/0"})
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1"):
        EventWatcher(create_app(settings), settings.broker, chat_key=CHAT).__enter__()


def test_tail_reports_that_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tail", "x", "--data-dir", str(tmp_path)]) == 2
    assert "nekro up" in capsys.readouterr().err


def test_cancel_of_an_unknown_chat_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["db", "upgrade", "--data-dir", str(tmp_path)]) == 0
    assert main(["cancel", "x", "--data-dir", str(tmp_path)]) == 4
    assert "no chat 'x'" in capsys.readouterr().err


def test_cancel_drops_the_variables_of_the_turn(
    tmp_path: Path,
    make_settings: Callable[..., Settings],
    migrated_copy: Callable[[str], DatabaseSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = make_settings(database=migrated_copy("sqlite").model_dump(), sandbox={"keep_variables": True})

    async def in_database(work: Callable[[Transaction], Awaitable[T]]) -> T:
        database = Database(settings.database, settings.data_dir)
        try:
            async with database.begin() as tx:
                return await work(tx)
        finally:
            await database.dispose()

    async def wait(tx: Transaction) -> str:
        await tx.chats.ensure("c")
        request = RoundRequest(chat_key="c", trigger_kind=TriggerKind.MANUAL, trigger_id="x")
        turn_id = (await tx.rounds.request(request))[0].turn_id
        kept = TurnVariables(turn_id=turn_id, chat_key="c", round_id="r", kept={"x": "1"}, not_kept=[])
        await tx.variables.replace(kept)
        return turn_id

    turn_id = asyncio.run(in_database(wait))
    monkeypatch.chdir(tmp_path)
    for name, value in environment_of(settings).items():
        monkeypatch.setenv(name, value)
    assert main(["cancel", "c"]) == 0
    assert asyncio.run(in_database(lambda tx: tx.variables.find(turn_id))) is None
