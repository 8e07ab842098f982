"""Redis restarts without its newest data: exactly the lost messages are published again."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from redis_process import RedisServer
from waiting import eventually
from worker_process import WorkerProcess, read_ledger

from broker_config.app import create_app
from broker_config.settings import Settings
from nekro.broker.calls import MethodCaller
from nekro.broker.publishing import PipelinePublisher, PublishUnknownError
from nekro.broker.redis.losses import Epoch, Place
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.errors import BrokerUnavailableError
from nekro_agent.methods import Lane


def invocation(*, seconds: float = 60) -> Invocation:
    """A call of a TOOL method that records its execution."""
    now = datetime.now(UTC)
    return Invocation(
        call_id=new_id(), method="m.wait", chat_key="c", container_key="k",
        issued_at=now, deadline=now + timedelta(seconds=seconds), args="0",
    )  # fmt: skip


@pytest.fixture
def settings(make_settings: Callable[..., Settings], own_redis: RedisServer) -> Settings:
    """Settings on the test's own Redis."""
    return make_settings(broker={"url": own_redis.url, "visibility_timeout_seconds": 4})


async def published(caller: MethodCaller, count: int) -> None:
    """Wait until the broker has accepted that many calls."""
    await eventually(
        lambda: sum(pending.place is not None for pending in caller._pending.values()) >= count,
        what="the messages to be placed",
    )


@pytest.mark.extended
async def test_calls_newer_than_the_last_snapshot_are_published_again(
    settings: Settings, own_redis: RedisServer, start_worker: Callable[..., WorkerProcess]
) -> None:
    kept, lost = [invocation() for _ in range(5)], [invocation() for _ in range(5)]
    app = create_app(settings)
    async with MethodCaller(app, settings) as caller:
        tasks = [asyncio.create_task(caller.call(call, lane=Lane.METHODS)) for call in kept]
        await published(caller, 5)
        with redis.Redis(port=own_redis.port) as client:
            client.save()
        tasks += [asyncio.create_task(caller.call(call, lane=Lane.METHODS)) for call in lost]
        await published(caller, 10)
        await asyncio.to_thread(own_redis.kill)
        await asyncio.to_thread(own_redis.start)
        start_worker("asyncio")
        answers = await asyncio.gather(*tasks)
    assert {answer.call_id for answer in answers} == {call.call_id for call in kept + lost}
    runs = Counter(task_id for task_id, what, *_ in read_ledger(settings) if what == "started")
    assert {runs[call.call_id] for call in kept + lost} == {1}


@dataclass(frozen=True)
class Message:
    """A task message without content."""

    body: tuple[list[Any], dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ([], {}, {}))
    headers: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)


async def test_an_epoch_determines_which_messages_were_lost(
    settings: Settings, own_redis: RedisServer
) -> None:
    publisher = PipelinePublisher(settings.broker)
    before = [(await publisher.send(Message(), queue="q", may_repeat=True)).place for _ in range(2)]
    with redis.Redis(port=own_redis.port) as client:
        client.save()
    before.append((await publisher.send(Message(), queue="q", may_repeat=True)).place)
    epoch = await publisher.epoch()
    assert epoch is not None
    assert all(place is not None and epoch.has(place) for place in before)

    await asyncio.to_thread(own_redis.kill)
    await asyncio.to_thread(own_redis.start)
    after = (await publisher.send(Message(), queue="q", may_repeat=True)).place
    epoch = await publisher.epoch()
    assert epoch is not None
    assert [place is not None and epoch.has(place) for place in [*before, after]] == [True, True, False, True]
    await publisher.close()


async def test_a_publish_reconnects_when_its_loop_was_blocked_for_the_connect_timeout(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker_config.settings.CONNECT_SECONDS", 1)
    publisher = PipelinePublisher(settings.broker.model_copy(update={"socket_timeout_seconds": 1}))
    sending = asyncio.create_task(publisher.send(Message(), queue="q", may_repeat=False))
    await asyncio.sleep(0)  # it is connecting
    time.sleep(1.1)  # Redis answered long before
    assert await sending is not None
    await publisher.close()


async def test_a_publish_fails_with_the_reason_when_no_connection_is_made_within_its_limit(
    settings: Settings, own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nekro.broker.publishing.PUBLISH_SECONDS", 2)
    settings = settings.model_copy(
        update={"broker": settings.broker.model_copy(update={"socket_timeout_seconds": 0.5})}
    )
    publisher = PipelinePublisher(settings.broker)
    assert own_redis.process is not None
    own_redis.process.send_signal(signal.SIGSTOP)
    with pytest.raises(BrokerUnavailableError, match="Timeout reading from") as caught:
        await publisher.send(Message(), queue="q", may_repeat=False)
    own_redis.process.send_signal(signal.SIGCONT)
    assert not isinstance(caught.value, PublishUnknownError)
    await publisher.close()


async def test_an_empty_redis_has_lost_all_messages(settings: Settings, own_redis: RedisServer) -> None:
    publisher = PipelinePublisher(settings.broker)
    place = (await publisher.send(Message(), queue="q", may_repeat=True)).place
    with redis.Redis(port=own_redis.port) as client:
        client.flushdb()
    epoch = await publisher.epoch()
    await publisher.close()
    assert place is not None and epoch is not None
    assert not epoch.has(place)


async def test_a_server_that_hides_its_run_id_starts_no_epoch(
    settings: Settings, own_redis: RedisServer
) -> None:
    user, password = "worker", uuid.uuid4().hex
    with redis.Redis(port=own_redis.port) as client:
        client.acl_setuser(
            user, enabled=True, passwords=[f"+{password}"], keys=["*"], channels=["*"],
            commands=["+@all", "-info"],
        )  # fmt: skip
    url = f"redis://{user}:{password}@127.0.0.1:{own_redis.port}/0"
    publisher = PipelinePublisher(settings.broker.model_copy(update={"url": url}))
    place = (await publisher.send(Message(), queue="q", may_repeat=True)).place
    epoch = await publisher.epoch()
    await publisher.close()
    assert place is not None and epoch is not None
    assert (place.word, place.number) == (epoch.word, 1)


def test_messages_of_an_epoch_before_the_last_count_as_lost() -> None:
    epoch = Epoch(word="c", before="b", kept=7)
    assert [epoch.has(Place(word, 3)) for word in "abc"] == [False, True, True]
    assert epoch.has(Place("b", 7)) and not epoch.has(Place("b", 8))
    assert epoch.moved(Place("b", 7)) == Place("c", 7)
