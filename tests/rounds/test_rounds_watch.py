"""Announcements of events: delivery, losses, and clean-up of what 0.2 left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest
import redis
from kombu import Queue
from waiting import WAIT_SECONDS, eventually

from broker_config.app import create_app
from broker_config.settings import DatabaseSettings, Settings
from broker_config.topology import AGENT_EVENTS, publish_round_requested
from nekro.broker.announcements import Announcements, Announcer
from nekro.cli.api import open_api
from nekro.cli.command import Deps
from nekro.cli.environment import environment_of
from nekro.cli.main import main
from nekro.cli.output import Output
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


class Heard:
    """What one process hears."""

    def __init__(self, settings: Settings) -> None:
        self.begun = 0
        self.added: list[tuple[str, int, frozenset[str]]] = []
        self.live: list[tuple[str, dict[str, Any]]] = []
        self.announcements = Announcements(
            settings,
            on_added=lambda *added: self.added.append(added),
            on_live=lambda chat_key, event: self.live.append((chat_key, dict(event))),
            on_begun=self._begin,
        )

    def _begin(self) -> None:
        self.begun += 1

    async def __aenter__(self) -> Self:
        self.announcements.need(True)
        assert await self.announcements.listening(seconds=WAIT_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.announcements.close()


async def announce(settings: Settings, number: int) -> None:
    """Announce an event of the chat; returns when Redis has published it."""
    announcer = Announcer(settings)
    announcer.added(CHAT, number, frozenset())
    await announcer.close()


def publish(settings: Settings, *messages: bytes) -> None:
    """Publish messages that no announcer of this release would."""
    with redis.Redis.from_url(str(settings.broker.url)) as client:
        for message in messages:
            client.publish(f"{settings.broker.key_prefix}events", message)


async def test_announcements_of_any_chat_arrive_in_order(settings: Settings) -> None:
    await announce(settings, 0)
    announcer = Announcer(settings)
    before = keys(settings, "*")
    async with Heard(settings) as one, Heard(settings) as other:
        announcer.added(CHAT, 1, frozenset({"message.sent", "call.ended"}))
        announcer.live("x" * 500, {"type": "model.delta", "data": {"text": "\ud800群"}})
        announcer.added("群聊" * 80, 2, frozenset())
        for heard in (one, other):
            await eventually(lambda heard=heard: len(heard.added) == 2, what="the announcements")
            assert heard.added == [
                (CHAT, 1, frozenset({"message.sent", "call.ended"})),
                ("群聊" * 80, 2, frozenset()),
            ]
            ((chat_key, event),) = heard.live
            assert chat_key == event["chat_key"] == "x" * 500
            assert event["data"] == {"text": "\ud800群"}
        assert (one.begun, other.begun) == (1, 1)
        assert keys(settings, "*") == before, "nothing is stored"
    await announcer.close()


async def test_announcements_that_nobody_needs_are_not_received(settings: Settings) -> None:
    channel = f"{settings.broker.key_prefix}events"
    with redis.Redis.from_url(str(settings.broker.url)) as client:

        def subscribers() -> int:
            return int(client.pubsub_numsub(channel)[0][1])

        async with Heard(settings) as heard:
            heard.announcements.need(False)
            await eventually(lambda: subscribers() == 0, what="the end of the subscription")
            assert not await heard.announcements.listening(seconds=0)
            await announce(settings, 1)
            heard.announcements.need(True)
            assert await heard.announcements.listening(seconds=WAIT_SECONDS)
            await announce(settings, 2)
            await eventually(lambda: heard.added == [(CHAT, 2, frozenset())], what="the second one")
            assert heard.begun == 2
        await eventually(lambda: subscribers() == 0, what="the end of the subscription")


async def test_messages_of_other_releases_are_ignored(settings: Settings) -> None:
    async with Heard(settings) as heard:
        publish(
            settings,
            b"", b"{", b"\xff", b"[]", b"5", b'{"kind":"added"}', b'{"kind":"added","body":[]}',
            b'{"kind":"added","body":{"chat_key":5,"number":1}}', b'{"kind":"live","body":{"chat_key":null}}',
            b'{"kind":"added","body":{"chat_key":"c","number":"1"}}',
            b'{"kind":"other","body":{"chat_key":"c"}}',
            b'{"kind":"added","body":{"chat_key":"c","number":1,"types":{"a":1}}}', b"[" * 100_000,
            b'{"kind":"added","body":{"chat_key":"c","number":1,"types":["a",2],"new":1}}',
        )  # fmt: skip
        await eventually(lambda: heard.added == [("c", 1, frozenset({"a"}))], what="the known one")
        assert heard.live == [] and heard.begun == 1


async def test_a_process_that_is_too_far_behind_begins_again(
    make_settings: Callable[..., Settings], own_redis: Any
) -> None:
    """Redis disconnects it; results of calls have another connection."""
    settings = make_settings(broker={"url": own_redis.url})
    async with Heard(settings) as heard:
        with redis.Redis.from_url(own_redis.url) as client:
            client.config_set("client-output-buffer-limit", "pubsub 1mb 1mb 1")
            # The loop does nothing meanwhile.
            channel = f"{settings.broker.key_prefix}events"
            while client.pubsub_numsub(channel)[0][1]:
                client.publish(channel, b"x" * (1 << 20))
        await eventually(lambda: heard.begun == 2, what="the second subscription")
        await announce(settings, 7)
        await eventually(lambda: (CHAT, 7, frozenset()) in heard.added, what="a later announcement")


async def test_the_sweep_deletes_the_queues_of_killed_watchers_only(
    settings: Settings,
) -> None:
    """Processes of 0.2 have such queues."""
    app = create_app(settings)
    prefix = settings.broker.key_prefix
    with app.connection_for_write() as connection:
        for name in ("watch.living", "watch.killed", "rounds-too"):
            queue = Queue(name, exchange=AGENT_EVENTS, routing_key="#.chat", durable=False)
            queue(connection.default_channel).declare()
        with redis.Redis.from_url(str(settings.broker.url)) as client:
            client.set(f"{prefix}watcher:living", "1")
            await asyncio.to_thread(publish_round_requested, app, "chat")
            assert len(keys(settings, "watch.*")) == 2
            seconds = await WatchSweep(app, settings.broker).sweep()
            assert seconds is not None and seconds > 1
            assert keys(settings, "watch.*") == [f"{prefix}watch.living".encode()]
            await asyncio.to_thread(publish_round_requested, app, "chat")
            lengths = [
                client.llen(f"{prefix}{name}") for name in ("watch.living", "watch.killed", "rounds-too")
            ]
            assert lengths == [2, 0, 2]


async def test_announcements_are_received_again_after_redis_was_killed(
    make_settings: Callable[..., Settings], own_redis: Any
) -> None:
    settings = make_settings(broker={"url": own_redis.url})
    async with Heard(settings) as heard:
        own_redis.kill()
        await eventually(lambda: heard.announcements.failure is not None, what="the end of the subscription")
        assert not await heard.announcements.listening(seconds=0)
        own_redis.start()
        await eventually(lambda: heard.begun == 2, what="the second subscription")
        assert heard.announcements.failure is None
        await announce(settings, 1)
        await eventually(lambda: heard.added == [(CHAT, 1, frozenset())], what="the announcement")


async def test_an_unreachable_broker_is_named(
    make_settings: Callable[..., Settings], migrated_copy: Callable[[str], DatabaseSettings]
) -> None:
    database = migrated_copy("sqlite").model_dump()
    settings = make_settings(broker={"url": "redis://127.0.0.1:1/0"}, database=database)
    deps = Deps(output=Output(), data_dir=None, load_settings=lambda: settings)
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:1"):
        async with open_api(deps) as api, api.chat(CHAT).events() as events:
            await anext(events)


async def test_a_reader_gives_up_when_the_broker_has_been_out_of_reach(
    make_settings: Callable[..., Settings],
    migrated_copy: Callable[[str], DatabaseSettings],
    own_redis: Any,
) -> None:
    settings = make_settings(broker={"url": own_redis.url}, database=migrated_copy("sqlite").model_dump())
    deps = Deps(output=Output(), data_dir=None, load_settings=lambda: settings)
    announcer = Announcer(settings)
    async with open_api(deps) as api, api.chat(CHAT).events(after=0, give_up_seconds=0) as events:
        coming = asyncio.ensure_future(anext(events))
        with redis.Redis.from_url(own_redis.url) as client:
            channel = f"{settings.broker.key_prefix}events"
            await eventually(lambda: client.pubsub_numsub(channel)[0][1] == 1, what="the subscription")
        announcer.live(CHAT, {"type": "output.chunk", "data": {"text": "one", "offset": 0}})
        assert (await coming).data["text"] == "one"
        own_redis.kill()
        with pytest.raises(BrokerUnavailableError):
            await anext(events)
    await announcer.close()


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
