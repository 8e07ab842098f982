"""Direct delivery to waiting workers: prompt, in order, one message per offered slot, none lost."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis_relay import RedisRelay
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess, queued, read_ledger

from broker_config.app import NekroApp, create_app
from broker_config.keys import Keys
from broker_config.primaries import Primary
from broker_config.settings import Settings
from nekro.broker.delivery.leases import DeliveryKeeper
from nekro.broker.delivery.offers import HANDOFF_SECONDS
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.broker.publishing import PipelinePublisher
from nekro.broker.redis.subscription import MAX_PUBLISHED_BYTES
from nekro.wire.invocation import new_id

StartWorker = Callable[..., WorkerProcess]


class World:
    """Redis of one test, a publisher on the test's loop, and reads of both."""

    def __init__(self, app: NekroApp, settings: Settings, client: redis.Redis) -> None:
        self.app, self.settings, self.client = app, settings, client
        self.publisher = PipelinePublisher(settings.broker)
        prefix = settings.broker.key_prefix
        self.queue, self.offers = f"{prefix}methods", Keys(prefix=prefix).offers("methods")
        self.held_key, self.leases_key = f"{prefix}unacked.methods", f"{prefix}unacked.methods_index"

    async def call(self, how: str = "ok", **body: Any) -> Any:
        """Publish a call of ``f.run`` as callers do; returns its ``AsyncResult``."""
        task_id = new_id()
        message = self.app.amqp.create_task_message(task_id, "f.run", [{"how": how, **body}])
        await self.publisher.send(message, queue="methods", may_repeat=False)
        return self.app.AsyncResult(task_id)

    async def value(self, result: Any) -> Any:
        """Wait for a result."""
        return await asyncio.to_thread(result.get, WAIT_SECONDS)

    async def offered(self, count: int = 1) -> None:
        """Wait until that many workers offer a slot."""
        await self.until(lambda: self.client.zcard(self.offers) == count, what=f"{count} offers")

    async def freeze(self, worker: WorkerProcess) -> None:
        """SIGSTOP a worker and wait until it has stopped."""
        worker.send(signal.SIGSTOP)
        state = Path(f"/proc/{worker.process.pid}/stat")
        await self.until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", what="the stop")

    async def hand_to_frozen(self, start_worker: StartWorker) -> tuple[WorkerProcess, Any]:
        """Start a worker and freeze it while it waits; returns it and the result of its call."""
        worker = await asyncio.to_thread(start_worker)
        await self.offered()
        await self.freeze(worker)
        result = await self.call(value="handed")
        assert self.held() == 1
        return worker, result

    async def until(self, condition: Callable[[], Any], *, what: str) -> None:
        """Wait for a condition without blocking the loop."""
        await asyncio.to_thread(wait_until, condition, what=what)

    def waiting(self) -> int:
        """Number of queued messages."""
        return queued(self.client, self.queue)

    def held(self) -> int:
        """Number of messages that workers hold."""
        return int(self.client.hlen(self.held_key))

    def longest_lease(self) -> float:
        """Seconds for which a held message still belongs to its worker; 0 without one."""
        ends = [end for _, end in self.client.zrange(self.leases_key, 0, -1, withscores=True)]
        return max(ends) - self.client.time()[0] if ends else 0

    def starts(self) -> list[str]:
        """The calls whose methods started, in order."""
        return [entry[0] for entry in read_ledger(self.settings) if entry[1] == "started"]

    def pushes(self) -> int:
        """Number of messages that were queued since Redis started."""
        return int(self.client.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0))


@pytest.fixture
def settings(own_redis: Any, make_settings: Callable[..., Settings]) -> Settings:
    """Settings on a Redis that only this test uses."""
    return make_settings(broker={"url": own_redis.url, "visibility_timeout_seconds": 20})


@pytest.fixture
async def world(app: NekroApp, settings: Settings, client: redis.Redis) -> AsyncIterator[World]:
    world = World(app, settings, client)
    yield world
    await world.publisher.close()


@pytest.mark.extended
async def test_a_waiting_worker_gets_its_calls_delivered_directly(
    world: World, start_worker: StartWorker
) -> None:
    await asyncio.to_thread(start_worker)
    for number in range(20):
        await world.offered()
        assert await world.value(await world.call(value=number)) == number
    assert world.pushes() == 0, "no call went through the queue"
    assert len(set(world.starts())) == 20
    await world.until(lambda: world.held() == 0, what="the acknowledgements")


@pytest.mark.extended
async def test_storing_a_result_acknowledges_its_delivery(world: World, start_worker: StartWorker) -> None:
    """In one step: a caller with an answer finds no held message."""
    await asyncio.to_thread(start_worker)
    for _ in range(30):
        await world.offered()
        result = await world.call()
        key = world.app.backend.get_key_for_task(result.id)
        while not world.client.exists(key):
            await asyncio.sleep(0)
        assert world.held() == 0


@pytest.mark.extended
async def test_results_on_another_redis_are_acknowledged_separately(
    world: World, start_worker: StartWorker, redis_server: Any, settings: Settings
) -> None:
    elsewhere = settings.model_copy(
        update={"results": settings.results.model_copy(update={"url": redis_server.url})}
    )
    world.app = create_app(elsewhere)
    await asyncio.to_thread(start_worker, settings=elsewhere)
    await world.offered()
    assert await world.value(await world.call(value=7)) == 7
    await world.until(lambda: world.held() == 0, what="the acknowledgement")
    world.app.backend.result_consumer.stop()
    world.app.close()


@pytest.mark.extended
async def test_older_messages_are_not_overtaken(
    world: World, start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = await asyncio.to_thread(start_worker)
    await world.offered()
    await world.freeze(worker)
    (offer,) = world.client.zrange(world.offers, 0, -1)
    message = world.app.amqp.create_task_message(new_id(), "f.run", [{"how": "ok"}])
    world.client.lpush(world.queue, json.dumps({"older": "message"}))
    await world.publisher.send(message, queue="methods", may_repeat=False)
    assert world.waiting() == 2
    assert world.client.zrange(world.offers, 0, -1) == [offer], "the offer was not taken"
    worker.send(signal.SIGCONT)


async def test_long_messages_are_sent_through_the_queue(world: World, start_worker: StartWorker) -> None:
    await asyncio.to_thread(start_worker)
    await world.offered()
    text = "x" * MAX_PUBLISHED_BYTES
    assert await world.value(await world.call(value=text)) == text
    assert world.pushes() == 1


@pytest.mark.parametrize("why", ["no subscriber", "it ended"])
async def test_an_offer_without_listener_or_past_its_end_is_dropped(why: str, world: World) -> None:
    slot = {"channel": "nobody", "queue": "methods", "index": "i", "held": "h", "seconds": 5}
    seconds, _ = world.client.time()
    ends_at = seconds + (60 if why == "no subscriber" else -1)
    with world.client.pubsub() as listener:  # type: ignore[no-untyped-call]
        if why == "it ended":
            listener.subscribe("nobody")
            assert listener.get_message(timeout=WAIT_SECONDS)
        world.client.zadd(world.offers, {json.dumps(slot): ends_at})
        await world.call()
        assert world.waiting() == 1
        assert not world.client.exists(world.offers, "h", "i")
        assert listener.get_message(timeout=0.1) is None


@pytest.mark.extended
async def test_no_more_messages_are_delivered_than_the_concurrency_allows(
    world: World, start_worker: StartWorker, tmp_path: Path
) -> None:
    await asyncio.to_thread(start_worker, concurrency=2)
    ends = [tmp_path / str(number) for number in range(6)]
    results = []
    for end in ends:
        results.append(await world.call("until", path=str(end)))
        await asyncio.sleep(0.1)  # longer than a worker takes to offer another slot
        assert world.held() <= 2
    await world.until(lambda: len(world.starts()) == 2, what="two calls to start")
    assert world.waiting() == 4
    for end in ends:
        end.touch()
    for result in results:
        assert await world.value(result) == "done"
    assert Counter(world.starts()) == Counter(result.id for result in results)


@pytest.mark.extended
async def test_a_call_delivered_to_a_frozen_worker_waits_for_one_short_lease(
    world: World, start_worker: StartWorker
) -> None:
    """It then runs on another worker, and the thawed one does not run it."""
    frozen, handed = await world.hand_to_frozen(start_worker)
    others = [await world.call(value=number) for number in range(3)]
    await asyncio.to_thread(start_worker)
    assert [await world.value(other) for other in others] == [0, 1, 2]
    assert await world.value(handed) == "handed"
    frozen.send(signal.SIGCONT)
    await asyncio.to_thread(frozen.wait_log, "delivery_too_late")
    await world.offered(2)
    assert await world.value(await world.call(value="after")) == "after"
    assert set(Counter(world.starts()).values()) == {1}
    await world.until(lambda: world.held() == 0, what="the acknowledgements")


@pytest.mark.extended
async def test_a_call_that_reaches_its_worker_after_its_lease_runs_once(
    world: World, start_worker: StartWorker, own_redis: Any
) -> None:
    """The worker is healthy; only its subscription is delayed."""
    async with RedisRelay(own_redis.port) as relay:
        update = {"url": relay.url, "socket_timeout_seconds": 60}
        broker = world.settings.broker.model_copy(update=update)
        settings = world.settings.model_copy(update={"broker": broker})
        lagging = await asyncio.to_thread(start_worker, settings=settings)
        await world.offered()
        subscriptions = [client for client in relay.clients if client.subscribes]
        for client in subscriptions:
            client.passes.clear()
        handed = await world.call(value="handed")
        assert world.held() == 1
        await asyncio.to_thread(start_worker)
        assert await world.value(handed) == "handed"
        for client in subscriptions:
            client.passes.set()
        await asyncio.to_thread(lagging.wait_log, "delivery_too_late")
        assert world.starts() == [handed.id]
        lagging.kill()


async def test_a_briefly_frozen_worker_runs_the_call_delivered_to_it(
    world: World, start_worker: StartWorker
) -> None:
    frozen, handed = await world.hand_to_frozen(start_worker)
    assert 0 < world.longest_lease() <= HANDOFF_SECONDS + 1
    frozen.send(signal.SIGCONT)
    assert await world.value(handed) == "handed"
    assert world.starts() == [handed.id]


@pytest.mark.extended
async def test_a_call_delivered_to_a_killed_worker_runs_on_another(
    world: World, start_worker: StartWorker
) -> None:
    killed, handed = await world.hand_to_frozen(start_worker)
    killed.kill()
    await asyncio.to_thread(start_worker)
    assert await world.value(handed) == "handed"
    assert world.starts() == [handed.id]


@pytest.mark.extended
async def test_a_blocked_worker_renews_the_leases_of_delivered_calls(
    world: World, start_worker: StartWorker, tmp_path: Path
) -> None:
    """The renewal runs on a thread, as the loop is blocked."""
    for _ in range(2):
        await asyncio.to_thread(start_worker)
    await world.offered(2)
    end = tmp_path / "end"
    result = await world.call("block", path=str(end))
    await world.until(lambda: world.longest_lease() > HANDOFF_SECONDS + 1, what="a renewed lease")
    end.touch()
    assert await world.value(result) == "done"
    assert world.starts() == [result.id]


@pytest.mark.extended
async def test_a_stop_withdraws_the_offer(world: World, start_worker: StartWorker) -> None:
    worker = await asyncio.to_thread(start_worker)
    await world.offered()
    worker.send(signal.SIGTERM)
    assert await asyncio.to_thread(worker.wait) == 0
    assert not world.client.exists(world.offers)
    result = await world.call(value=1)
    assert (world.waiting(), world.held()) == (1, 0)
    await asyncio.to_thread(start_worker)
    assert await world.value(result) == 1


@pytest.mark.extended
async def test_workers_that_stop_under_load_lose_no_call_and_run_none_twice(
    world: World, start_worker: StartWorker
) -> None:
    workers = [await asyncio.to_thread(start_worker, concurrency=4) for _ in range(3)]
    results = []
    stops = {40: workers[0], 80: workers[1]}
    for number in range(120):
        if number in stops:
            stops[number].send(signal.SIGTERM)
        results.append(await world.call("wait", seconds=0.005))
        await asyncio.sleep(0.01)
    for worker in workers[:2]:
        assert await asyncio.to_thread(worker.wait) == 0
    for result in results:
        assert await world.value(result) == "done"
    assert Counter(world.starts()) == Counter(result.id for result in results)
    await world.until(lambda: world.held() == 0, what="the acknowledgements")
    assert world.waiting() == 0


@pytest.mark.extended
async def test_a_call_given_back_by_a_stop_counts_no_delivery(
    world: World, start_worker: StartWorker, tmp_path: Path
) -> None:
    """A delivered call that has not started is returned without a trace."""
    worker = await asyncio.to_thread(
        start_worker, "asyncio", "--prefetch-multiplier", "4", "-l", "DEBUG", concurrency=1
    )
    end = tmp_path / "end"
    first = await world.call("until", path=str(end))
    await world.until(lambda: world.starts() == [first.id], what="the first call to start")
    await world.offered()
    second = await world.call(value=2)
    assert world.held() == 2
    worker.send(signal.SIGTERM)
    await asyncio.to_thread(worker.wait_log, "Stopping Pool")  # no message is taken after this
    end.touch()
    assert await asyncio.to_thread(worker.wait) == 0
    (raw,) = world.client.lrange(world.queue, 0, -1)
    assert DELIVERIES_HEADER not in json.loads(raw)["headers"]
    await asyncio.to_thread(start_worker)
    assert await world.value(second) == 2
    assert Counter(world.starts()) == Counter([first.id, second.id])


@pytest.mark.extended
async def test_a_cut_subscription_is_restored(world: World, start_worker: StartWorker) -> None:
    worker = await asyncio.to_thread(start_worker)
    await world.offered()
    (subscribed,) = (each for each in world.client.client_list(_type="pubsub") if each["sub"] == "1")
    world.client.client_kill_filter(_id=subscribed["id"])
    # Until then it offers no slot, as nothing would receive the message.
    result = await world.call(value=1)
    assert await world.value(result) == 1
    await world.until(lambda: world.client.pubsub_channels("*handed*"), what="the subscription")
    world.client.delete(world.offers)
    await world.offered()
    before = world.pushes()
    assert await world.value(await world.call(value=2)) == 2
    assert world.pushes() == before
    assert worker.process.poll() is None


async def test_many_calls_at_once_run_each_once(world: World, start_worker: StartWorker) -> None:
    for _ in range(2):
        await asyncio.to_thread(start_worker, concurrency=20)
    await world.offered(2)
    results = await asyncio.gather(*(world.call(value=number) for number in range(400)))
    assert [await world.value(result) for result in results] == list(range(400))
    assert Counter(world.starts()) == Counter(result.id for result in results)
    await world.until(lambda: world.held() == 0, what="the acknowledgements")


@pytest.mark.extended
async def test_a_worker_of_several_queues_offers_no_place(world: World, start_worker: StartWorker) -> None:
    await asyncio.to_thread(start_worker, lane="methods,long")
    for number in range(5):
        assert await world.value(await world.call(value=number)) == number
        assert not world.client.keys("*offers*")
    assert world.pushes() == 5, "every call went through the queue"


@pytest.mark.extended
async def test_a_cancelled_consumer_offers_no_place(world: World, start_worker: StartWorker) -> None:
    await asyncio.to_thread(start_worker)
    await world.offered()
    control = world.app.control
    assert await asyncio.to_thread(
        control.cancel_consumer, "methods", reply=True, limit=1, timeout=WAIT_SECONDS
    )
    await world.until(lambda: not _is_listed(world, "methods"), what="the queue to be left")
    left = await world.call(value=1)
    await world.until(
        lambda: world.client.info("clients")["blocked_clients"] == 0, what="the last wait to end"
    )
    assert not _is_listed(world, "methods")
    assert (world.waiting(), world.held()) == (1, 0)
    assert not world.client.exists(world.offers)
    assert await asyncio.to_thread(control.add_consumer, "methods", reply=True, limit=1, timeout=WAIT_SECONDS)
    assert await world.value(left) == 1
    await world.offered()


def _is_listed(world: World, queue: str) -> bool:
    answers = world.app.control.inspect(limit=1, timeout=WAIT_SECONDS).active_queues() or {}
    return any(each["name"] == queue for found in answers.values() for each in found)


def test_only_short_leases_are_renewed_soon(client: redis.Redis) -> None:
    """A worker may hold thousands of calls while others are delivered continuously."""
    held = {tag: SimpleNamespace(headers={}) for tag in ("long", "short")}
    channel: Any = SimpleNamespace(
        keeper=None,
        closed=False,
        global_keyprefix="",
        unacked_index_key="index",
        unacked_key="held",
        qos=SimpleNamespace(held=lambda: held),
    )
    now = client.time()[0]
    client.zadd("index", {"long": now + 100, "short": now + 1, "gone": now + 1})
    keeper = DeliveryKeeper(client, Primary(None), visibility_timeout_seconds=60)
    keeper.start()
    keeper.adopt(channel, running=set())
    try:
        for tag in ("short", "gone"):
            keeper.renew_soon(tag)
        wait_until(lambda: client.zscore("index", "short") > now + 50, what="the renewal")
        assert client.zscore("index", "long") == now + 100
        assert client.zscore("index", "gone") == now + 1, "it ended, so no worker holds it"
    finally:
        held.clear()
        keeper.close(running=set())
