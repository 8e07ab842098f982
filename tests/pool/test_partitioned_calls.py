"""Chats partitioned over two Redis servers (`NEKRO_BROKER__PARTITIONS`), on the level of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from fleet_probes import chats_of
from redis_process import RedisServer
from waiting import eventually
from worker_process import WorkerProcess, read_ledger

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.broker.broker_figures import BrokerFigures, read_brokers
from nekro.broker.calls import MethodCaller
from nekro.broker.chat_messages import request_round
from nekro.cli.doctor.service_checks import CheckState, broker_checks
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.errors import BrokerUnavailableError, MethodFailedError
from nekro_agent.methods import Lane


@pytest.fixture
def settings(make_settings: Callable[..., Settings], own_redis: RedisServer) -> Settings:
    """Settings with the test's own Redis as the second server."""
    return make_settings(broker={"partitions": [own_redis.url]})


@pytest.fixture
async def caller(settings: Settings) -> AsyncIterator[MethodCaller]:
    app = create_app(settings)
    async with MethodCaller(app, settings) as caller:
        yield caller
    app.close()


def call_of(chat_key: str, method: str = "m.noop", args: str = "", *, seconds: float = 30) -> Invocation:
    now = datetime.now(UTC)
    return Invocation(
        call_id=new_id(), method=method, chat_key=chat_key, container_key="k",
        issued_at=now, deadline=now + timedelta(seconds=seconds), args=args,
    )  # fmt: skip


def answers(client: Any, settings: Settings) -> int:
    """How many results a server has."""
    return len(client.keys(f"{settings.broker.key_prefix}celery-task-meta-*"))


@pytest.fixture
def chats(settings: Settings) -> list[str]:
    """Chats of both servers, which follow from their addresses: of any twelve all may be of one."""
    return [*chats_of(settings, 0, count=6), *chats_of(settings, 1, count=6)]


def states_of(settings: Settings) -> list[BrokerFigures]:
    app = create_app(settings)
    try:
        return read_brokers(app)
    finally:
        app.close()


@pytest.fixture
def both(settings: Settings, own_redis: RedisServer) -> Any:
    assert settings.broker.url is not None
    with redis.Redis.from_url(settings.broker.url) as first, redis.Redis(port=own_redis.port) as second:
        yield first, second


@pytest.mark.parametrize(("pool", "lane"), [("asyncio", Lane.METHODS), ("threads", Lane.LONG)])
async def test_calls_are_answered_by_the_server_of_their_chat(
    settings: Settings,
    caller: MethodCaller,
    start_worker: Callable[..., WorkerProcess],
    both: Any,
    chats: list[str],
    pool: str,
    lane: Lane,
) -> None:
    start_worker(pool, lane=lane.value)
    first, second = both
    seen = f"{settings.broker.key_prefix}unacked.{lane.value}_index_seen"
    await eventually(lambda: second.exists(seen), what="the worker's intake of the second server")
    calls = [caller.call(call_of(chat), lane=lane) for chat in chats for _ in range(5)]
    assert {answer.text for answer in await asyncio.gather(*calls)} == {"x"}
    assert answers(first, settings) == answers(second, settings) == 5 * 6
    held = f"{settings.broker.key_prefix}unacked.{lane.value}"
    await eventually(lambda: not first.exists(held) and not second.exists(held), what="acknowledgements")


async def test_failures_reach_the_callers_of_both_servers(
    caller: MethodCaller,
    settings: Settings,
    start_worker: Callable[..., WorkerProcess],
    both: Any,
    chats: list[str],
) -> None:
    start_worker()
    seen = f"{settings.broker.key_prefix}unacked.methods_index_seen"
    await eventually(lambda: both[1].exists(seen), what="the second server")
    for chat in chats:
        with pytest.raises(MethodFailedError, match="Weird"):
            await caller.call(call_of(chat, "m.fail"), lane=Lane.METHODS)
    assert all(answers(client, settings) for client in both)


async def test_workers_without_the_partition_get_its_calls_on_the_first_server(
    make_settings: Callable[..., Settings],
    caller: MethodCaller,
    settings: Settings,
    start_worker: Callable[..., WorkerProcess],
    both: Any,
    chats: list[str],
) -> None:
    """Workers are restarted one after another when a server is added."""
    old = settings.model_copy(update={"broker": settings.broker.model_copy(update={"partitions": ()})})
    start_worker(settings=old)
    calls = [caller.call(call_of(chat), lane=Lane.METHODS) for chat in chats]
    assert {answer.text for answer in await asyncio.gather(*calls)} == {"x"}
    assert answers(both[1], settings) == 0


async def test_only_chats_of_a_server_that_is_down_wait(
    settings: Settings,
    caller: MethodCaller,
    own_redis: RedisServer,
    start_worker: Callable[..., WorkerProcess],
    both: Any,
) -> None:
    worker = start_worker()
    seen = f"{settings.broker.key_prefix}unacked.methods_index_seen"
    await eventually(lambda: both[1].exists(seen), what="the second server")
    here, there = (chats_of(settings, server, count=1)[0] for server in range(2))
    assert (await caller.call(call_of(there), lane=Lane.METHODS)).text == "x"
    own_redis.kill()
    worker.wait_log("server_lost")
    for _ in range(20):
        assert (await caller.call(call_of(here), lane=Lane.METHODS)).text == "x"
    with pytest.raises(BrokerUnavailableError, match=str(own_redis.port)):
        await caller.call(call_of(there), lane=Lane.METHODS)
    brokers = await asyncio.to_thread(states_of, settings)
    assert [(one.name, one.queues is not None) for one in brokers] == [
        (settings.broker.url, True),
        (own_redis.url, False),
    ]
    first, second = await asyncio.to_thread(broker_checks, settings)
    assert first.verdict is not CheckState.FAILED and second.verdict is CheckState.FAILED
    assert own_redis.url in second.detail and second.detail.endswith("its chats wait")
    assert "NEKRO_BROKER__PARTITIONS" in second.fix
    own_redis.start()
    worker.wait_log("server_reached_again")
    assert (await caller.call(call_of(there), lane=Lane.METHODS)).text == "x"


async def test_a_call_does_not_wait_behind_one_of_another_server(
    settings: Settings, caller: MethodCaller, start_worker: Callable[..., WorkerProcess], both: Any
) -> None:
    """All slots of a worker are taken by a call of one server; it takes none of the other meanwhile."""
    for _ in range(2):
        start_worker(concurrency=1)
    seen = f"{settings.broker.key_prefix}unacked.methods_index_seen"
    await eventually(lambda: both[1].exists(seen), what="the second server")
    for first, second in ((0, 1), (1, 0)):
        waits = call_of(chats_of(settings, first, count=1)[0], "m.wait", "3")
        long = asyncio.create_task(caller.call(waits, lane=Lane.METHODS))
        await eventually(
            lambda entry=[waits.call_id, "started"]: entry in read_ledger(settings), what="the long call"
        )
        other = chats_of(settings, second, count=1)[0]
        for _ in range(20):
            assert (await caller.call(call_of(other), lane=Lane.METHODS)).text == "x"
        assert not long.done()
        await long


async def test_a_round_is_announced_on_the_server_of_its_chat(
    settings: Settings, both: Any, chats: list[str]
) -> None:
    app = create_app(settings)
    queues = f"{settings.broker.key_prefix}rounds"
    for chat in chats:
        await asyncio.to_thread(request_round, app, chat)
    assert both[0].llen(queues) == len(chats), "no worker serves the second server"
    seen = f"{settings.broker.key_prefix}unacked.rounds_index_seen"
    both[1].hset(seen, "at", both[1].time()[0])
    for chat in chats:
        await asyncio.to_thread(request_round, app, chat)
    assert both[1].llen(queues) == 6
    assert both[0].llen(queues) == 2 * len(chats) - 6
    app.close()


async def test_doctor_says_when_a_drained_server_is_empty(
    settings: Settings, own_redis: RedisServer, both: Any
) -> None:
    drained = settings.model_copy(
        update={"broker": settings.broker.model_copy(update={"partitions": (f"{own_redis.url}#drain",)})}
    )
    both[1].lpush(f"{settings.broker.key_prefix}rounds", "message")
    _, check = await asyncio.to_thread(broker_checks, drained)
    assert check.detail.endswith("drained, 1 messages left")
    both[1].delete(f"{settings.broker.key_prefix}rounds")
    _, check = await asyncio.to_thread(broker_checks, drained)
    assert check.detail.endswith("drained, empty: it can go from NEKRO_BROKER__PARTITIONS")


async def test_dead_letters_are_moved_to_the_first_server(
    settings: Settings, start_worker: Callable[..., WorkerProcess], both: Any
) -> None:
    first, second = both
    start_worker()
    seen = f"{settings.broker.key_prefix}unacked.methods_index_seen"
    await eventually(lambda: second.exists(seen), what="the second server")
    second.lpush(f"{settings.broker.key_prefix}methods", b"not a message")
    second.lpush(f"{settings.broker.key_prefix}methods", json.dumps({"headers": {}}))
    dead = f"{settings.broker.key_prefix}dead"
    await eventually(lambda: first.llen(dead) == 2 and not second.exists(dead), what="the dead letters")
