"""Results and acknowledgements reach the server that is the primary, while the one before still answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import states
from redis_process import RedisServer
from redis_relay import RedisRelay
from sentinel_group import SentinelGroup
from waiting import eventually

from broker_config.app import NekroApp, create_app
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import BrokerSettings, Settings
from nekro.base.greenlet_bridge import close_loop_resources
from nekro.broker.delivery.leases import DeliveryKeeper
from nekro.broker.delivery.offers import Ack, Ending
from nekro.broker.redis.link import RedisLink
from nekro.wire.invocation import new_id


class World:
    """An address that leads to one server and then to another; connections to the first one stay open."""

    def __init__(self, relay: RedisRelay, old: redis.Redis, new: redis.Redis, settings: Settings) -> None:
        self.relay, self.old, self.new, self.settings = relay, old, new, settings
        self.app: NekroApp = create_app(settings)
        self.ack: Ack = (f"index:{new_id()}", f"held:{new_id()}", "tag")

    def hold(self, server: redis.Redis) -> None:
        """Let a server have the delivery."""
        index, held, tag = self.ack
        server.zadd(index, {tag: 2e9})
        server.hset(held, tag, "message")

    def move(self) -> None:
        """Lead later connections to the new server."""
        self.relay.target = int(self.new.connection_pool.connection_kwargs["port"])

    def is_held(self, server: redis.Redis) -> bool:
        """Whether a server has the delivery."""
        index, held, tag = self.ack
        return bool(server.hexists(held, tag)) or server.zscore(index, tag) is not None

    def state(self, server: redis.Redis, task_id: str) -> str | None:
        """State of a result that a server has."""
        raw: Any = server.get(self.app.backend.get_key_for_task(task_id))
        return None if raw is None else str(self.app.backend.decode(raw)["status"])

    async def meet_new(self) -> None:
        """Open a connection to the new server, as other parts of a process do."""
        link = RedisLink(self.settings.broker, self.settings.broker.url)
        await link.execute("PING")
        await link.close()


@pytest.fixture
async def world(
    redis_server: RedisServer, own_redis: RedisServer, make_settings: Callable[..., Settings]
) -> AsyncIterator[World]:
    with redis.Redis(port=redis_server.port) as old, redis.Redis(port=own_redis.port) as new:
        async with RedisRelay(redis_server.port) as relay:
            made = World(relay, old, new, make_settings(broker={"url": relay.url}))
            yield made
            await close_loop_resources()
            await asyncio.to_thread(made.app.backend.disconnect)
            await asyncio.to_thread(made.app.close)


async def store(world: World, task_id: str) -> bool:
    """Store a result that ends the delivery."""
    ending = Ending(world.ack, None, lambda _is_stored: None)
    stored: bool = await world.app.backend.store_success(task_id, 1, reply_to=None, ending=ending)
    return stored


async def test_a_result_whose_delivery_the_server_does_not_have_reaches_the_one_that_has_it(
    world: World,
) -> None:
    first, second = new_id(), new_id()
    world.hold(world.old)
    assert await store(world, first)
    assert not world.is_held(world.old)
    world.move()
    world.hold(world.new)
    assert await store(world, second)
    await eventually(lambda: world.state(world.new, second) == states.SUCCESS, what="the result")
    assert not world.is_held(world.new)


async def test_the_latest_results_are_stored_again_on_a_new_primary(world: World) -> None:
    task_id = new_id()
    world.hold(world.old)
    world.hold(world.new)  # which has replicated the delivery
    assert await store(world, task_id)
    world.move()
    await world.meet_new()
    await eventually(lambda: world.state(world.new, task_id) == states.SUCCESS, what="the result")
    assert not world.is_held(world.new)


async def test_a_repeated_failure_does_not_replace_a_success_of_the_new_primary(world: World) -> None:
    failed, other, backend = new_id(), new_id(), world.app.backend
    for task_id in (failed, other):
        await asyncio.to_thread(backend.mark_as_failure, task_id, ValueError("x"))
    world.move()
    world.new.set(backend.get_key_for_task(failed), '{"status": "SUCCESS", "result": 1}')
    await world.meet_new()
    await eventually(lambda: world.state(world.new, other) == states.FAILURE, what="the repetition")
    assert world.state(world.new, failed) == states.SUCCESS


async def test_the_latest_acknowledgements_are_sent_again_to_a_new_primary(world: World) -> None:
    endpoint = RedisEndpoint(world.settings.broker, world.settings.broker.url)
    keeper = DeliveryKeeper(endpoint.client(), endpoint.primary, visibility_timeout_seconds=60)
    index, held, tag = world.ack
    channel: Any = SimpleNamespace(
        closed=False, global_keyprefix="", unacked_index_key=index, unacked_key=held,
        qos=SimpleNamespace(held=dict),
    )  # fmt: skip
    world.hold(world.old)
    world.hold(world.new)
    keeper.start()
    try:
        keeper.acknowledge(channel, tag)
        await eventually(lambda: not world.is_held(world.old), what="the acknowledgement")
        world.move()
        await world.meet_new()
        await eventually(lambda: not world.is_held(world.new), what="the same on the new primary")
    finally:
        await asyncio.to_thread(keeper.close, running=set())


@pytest.mark.extended
async def test_idle_connections_leave_a_primary_that_was_replaced_and_still_accepts_writes(
    tmp_path: Path,
) -> None:
    with SentinelGroup(tmp_path) as group:
        broker = BrokerSettings.model_validate(group.settings())
        endpoint, link = RedisEndpoint(broker, broker.url), RedisLink(broker, broker.url)
        with endpoint.client() as client:
            old = await asyncio.to_thread(group.primary)
            await link.execute("SET", "before", "x")
            await asyncio.to_thread(client.set, "before", "x")
            group.freeze(old)
            new = await asyncio.to_thread(group.wait_for_failover, old)
            group.thaw(old)
            await eventually(lambda: endpoint.primary.term > 0, what="the process to learn of the failover")
            with redis.Redis(port=old.port) as of_old, redis.Redis(port=new.port) as of_new:
                await link.execute("SET", "by link", "x")
                await asyncio.to_thread(client.set, "by client", "x")
                assert of_new.exists("by link", "by client") == 2
                if of_old.role()[0] == b"master":  # else it was demoted already, and has them as a replica
                    assert of_old.exists("by link", "by client") == 0
        await link.close()
