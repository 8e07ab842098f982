"""Chats partitioned over two Redis servers: workers, rounds and jobs of a whole fleet.

Servers are added and taken away, and one is killed, while calls, rounds and jobs run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from fleet_probes import chats_of
from redis_process import RedisServer
from test_rolling_restart import (
    CHATS,
    HERE,
    SCRIPT,
    Load,
    account,
    account_of_rounds,
    replace,
    settled_rounds,
)
from waiting import WAIT_SECONDS, eventually

from broker_config.settings import Settings
from storage.repositories.rounds import Round

pytestmark = pytest.mark.extended

#: Calls and messages are made in chats of both servers.
CALLERS: dict[str, list[tuple[Any, ...]]] = {
    "work": [(0.0,)] * 6 + [(1.0,)] * 2,
    "keep": [()] * 3,
    "dig": [(0.3,)] * 2,
}


@pytest.fixture(scope="module")
def database_url() -> str:
    return "sqlite:///unused.db"


@pytest.fixture
def fleet(make_fleet: Callable[..., Any], tmp_path: Path) -> Any:
    """A fleet with a scripted model, on the session's Redis alone."""
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump(SCRIPT))
    return make_fleet(
        database={"url": f"sqlite:///{tmp_path / 'nekro.db'}"},
        plugins={"dirs": (HERE / "rolling_plugins",)},
        llm={"script": script},
        agent={"debounce_seconds": 0},
        workers={"long_methods": ("tests.rolling.dig",)},
    )


def with_partitions(settings: Settings, *urls: str) -> Settings:
    return settings.model_copy(update={"broker": settings.broker.model_copy(update={"partitions": urls})})


class Second:
    """What the second server has of a fleet."""

    def __init__(self, server: RedisServer, settings: Settings) -> None:
        self._prefix = settings.broker.key_prefix
        self.client = redis.Redis(port=server.port)

    def has_workers(self, *lanes: str) -> bool:
        return all(self.client.exists(f"{self._prefix}unacked.{lane}_index_seen") for lane in lanes)

    def sent(self) -> int:
        """How many calls of callers it has had."""
        return int(self.client.hget(f"{self._prefix}epochs", "last") or 0)

    def left(self) -> dict[str, int]:
        """Messages in queues, and held ones."""
        lanes = ("methods", "long", "rounds")
        counts = {lane: self.client.llen(f"{self._prefix}{lane}") for lane in lanes}
        counts |= {f"held {lane}": self.client.hlen(f"{self._prefix}unacked.{lane}") for lane in lanes}
        return {name: count for name, count in counts.items() if count}


class Rolling:
    """A fleet whose workers, and then callers, are replaced one after another under load."""

    def __init__(self, fleet: Any, calls_in: list[str]) -> None:
        self._fleet, self._calls_in = fleet, calls_in
        self._workers: list[Any] = []
        self._running: list[asyncio.Task[None]] = []
        self.callers: list[Any] = []
        self.loads: list[Load] = []

    async def start(self, settings: Settings) -> None:
        lanes = ("methods", "methods", "long", "rounds")
        self._workers = await asyncio.to_thread(self._fleet.start, *lanes, settings=settings)
        await self.replace_callers(settings)

    async def replace_callers(self, settings: Settings) -> None:
        """As gateways are replaced: the old ones end what they began."""
        self._fleet.settings = settings
        services = self._fleet.services()
        await services.start()
        self.callers.append(services)
        await self.stop()
        first = 1 + 100_000 * len(self.loads)
        load = Load(services, CALLERS, *CHATS, calls_in=self._calls_in, first=first)
        self.loads.append(load)
        self._running.append(asyncio.create_task(load.run()))
        await load.go_on(50)

    async def replace_workers(self, settings: Settings) -> None:
        for number, old in enumerate(self._workers):
            self._workers[number] = await replace(self._fleet, old, settings=settings)
            await self.loads[-1].go_on(20)

    async def stop(self) -> None:
        """Stop the load, and wait for the calls that are open."""
        for load in self.loads:
            load.stop()
        if self._running:
            await asyncio.wait(self._running, timeout=WAIT_SECONDS)

    async def close(self) -> None:
        await self.stop()
        for services in self.callers:
            await services.close()

    def whole(self) -> Load:
        """What all callers did."""
        whole = Load(self.callers[-1], CALLERS)
        for load in self.loads:
            whole.failures += load.failures
            whole.messages += load.messages
            for method, values in load.values.items():
                whole.values[method] += values
        return whole


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_server_is_added_and_taken_away_under_load(fleet: Any, own_redis: RedisServer) -> None:
    """Workers are restarted one after another with each new list, callers after them."""
    alone = fleet.settings
    both = with_partitions(alone, own_redis.url)
    drained = with_partitions(alone, f"{own_redis.url}#drain")
    second = Second(own_redis, alone)
    rolling = Rolling(fleet, [*chats_of(both, 0, count=4), *chats_of(both, 1, count=4)])
    try:
        await rolling.start(alone)
        await rolling.replace_workers(both)
        await eventually(
            lambda: second.has_workers("methods", "long", "rounds"), what="workers of the second"
        )
        await rolling.replace_callers(both)
        await eventually(lambda: second.sent() > 20, what="calls on the second server")
        await rolling.replace_workers(drained)
        await rolling.replace_callers(drained)
        await eventually(lambda: not second.left(), what=lambda: f"{second.left()} left on the second server")
        sent = second.sent()
        await rolling.replace_workers(alone)
        await rolling.replace_callers(alone)
        await rolling.stop()
        assert second.sent() == sent, "a drained server gets no call"
        services, whole = rolling.callers[-1], rolling.whole()
        rounds = await settled_rounds(services)
        assert second.left() == {}
        account(whole, services, fleet)
        await account_of_rounds(whole, rounds, services, fleet)
    finally:
        await rolling.close()
        second.client.close()
    print(f"{whole.done} calls and {whole.messages} messages; {sent} calls over the second server")


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_only_chats_of_a_killed_server_wait(fleet: Any, own_redis: RedisServer) -> None:
    """Its chats go on when it is back, although it has lost everything; no round is lost or repeated."""
    fleet.settings = settings = with_partitions(fleet.settings, own_redis.url)
    here, there = chats_of(settings, 0, count=4), chats_of(settings, 1, count=4)
    second = Second(own_redis, settings)
    await asyncio.to_thread(fleet.start, "methods", "long", "rounds")
    await eventually(lambda: second.has_workers("methods", "long", "rounds"), what="workers of the second")
    services = fleet.services()
    await services.start()
    of_here = Load(services, CALLERS, *here[:2], calls_in=here)
    of_there = Load(services, {"keep": [()] * 3}, *there[:2], calls_in=there, first=100_000)
    running = [asyncio.create_task(load.run()) for load in (of_here, of_there)]
    try:
        await of_here.go_on(30)
        await of_there.go_on(10)
        own_redis.kill()
        before = of_there.done
        await of_here.go_on(60)
        assert of_there.done <= before + 3, "calls that had been answered"
        own_redis.start()
        await of_there.go_on(20)
        for load in (of_here, of_there):
            load.stop()
        await asyncio.wait(running, timeout=WAIT_SECONDS)
        rounds = await settled(services, [*here[:2], *there[:2]])
        assert of_here.failures == []
        allowed = ("BrokerUnavailableError", "OutcomeUnknownError", "CallTimeoutError")
        assert [text for text in of_there.failures if not any(name in text for name in allowed)] == []
        of_there.failures.clear()
        account(of_here, services, fleet)
        assert of_here.messages + of_there.messages == sum(one.trigger_kind == "message" for one in rounds)
        assert {one.state.value for one in rounds} <= {"done", "merged"}, fleet.logs()
    finally:
        for load in (of_here, of_there):
            load.stop()
        await asyncio.gather(*running, return_exceptions=True)
        await services.close()
        second.client.close()


async def settled(services: Any, chats: list[str]) -> list[Round]:
    """All rounds of chats, once none waits or runs."""

    async def none_is_open() -> bool:
        async with services.database.read() as transaction:
            rounds = await transaction.overview.rounds()
            return not rounds.waiting + rounds.running

    await eventually(none_is_open, what="the end of the rounds")
    async with services.database.read() as transaction:
        return [one for chat in chats for one in await transaction.rounds.newest(chat, limit=5000)]
