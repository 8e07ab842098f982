"""RabbitMQ as broker, chosen by its URL alone; results stay in Redis."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chaos_world import (
    HELD,
    Account,
    call,
    opened,
    publish_methods,
    release,
    rows,
    started,
    times,
    worker_that_runs,
)
from kombu import Queue
from kombu.exceptions import OperationalError
from rabbit_server import RabbitServer, rabbit_binary
from redis_process import free_port
from redis_relay import RedisRelay
from waiting import WAIT_SECONDS, eventually
from worker_fleet import Fleet

from broker_config.app import NekroApp, create_app
from broker_config.keys import DEAD_QUEUE
from broker_config.topology import count_waiting, publish_round_requested
from nekro.app import use_cases
from nekro.broker.publishing import KombuPublisher, PublishUnknownError
from nekro.wire.invocation import new_id
from nekro_agent.errors import BrokerUnavailableError, OutcomeUnknownError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(rabbit_binary() is None, reason="needs rabbitmq-server (apt install rabbitmq-server)"),
]

SCRIPT = """
- when: 'please wake'
  answer: |
    ```python
    print(work("T-in-sandbox"))
    wake("A-round")
    ```
- when: 'wake A-round'
  answer: |
    ```python
    send_msg_text(_ck, "woken")
    ```
"""


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    """One node for the module."""
    server = RabbitServer(tmp_path_factory.mktemp("rabbit"), ports=(free_port(), free_port(), free_port()))
    server.start()
    yield server
    server.close()


@pytest.fixture
def fleet(
    make_chaos: Callable[..., Fleet], rabbit: RabbitServer, own_redis: Any, tmp_path: Path
) -> Iterator[Fleet]:
    """A fleet on RabbitMQ."""
    script = tmp_path / "script.yaml"
    script.write_text(SCRIPT)
    made = make_chaos(
        "postgres", broker_url=rabbit.url, results={"url": own_redis.url}, llm={"script": script}
    )
    yield made
    made.stop()
    purge(made)


def purge(fleet: Fleet) -> None:
    """Delete the queues, as the node is shared by the module."""
    from broker_config.app import create_app

    app = create_app(fleet.settings)
    with app.connection_for_write() as connection:
        for queue in app.conf.task_queues:
            queue(connection.default_channel).delete()
    app.close()


async def test_calls_of_every_type_come_back(fleet: Fleet) -> None:
    fleet.start("methods", "methods")
    account = Account()
    async with opened(fleet) as services:
        await asyncio.gather(
            *(account.follow(f"T{n}", call(services, "work", f"T{n}")) for n in range(200)),
            *(account.follow(f"E{n}", call(services, "effect", f"E{n}")) for n in range(50)),
            *(account.follow(f"A{n}", call(services, "wake", f"A{n}")) for n in range(20)),
        )
        doubled, missing = await account.doubled_and_missing(services, fleet)
    assert len(account.ok) == 270, (account.errors, account.wild)
    assert (doubled, missing) == ([], [])
    assert set(times(fleet, "start").values()) == {1}


async def test_agent_result_wakes_a_round(fleet: Fleet) -> None:
    fleet.start("methods", "rounds")
    async with opened(fleet) as services:
        await use_cases.receive_message(services, "chat", "please wake", user_id="u", user_name="U")

        async def said() -> bool:
            return bool(await rows(services, "SELECT 1 FROM messages WHERE text = 'woken'"))

        await eventually(said, what=lambda: f"the follow-up round\n{fleet.logs()}")
    assert times(fleet, "end") == {"T-in-sandbox": 1, "A-round": 1}


async def test_killed_worker_s_calls_are_redelivered_and_poison_becomes_a_dead_letter(
    fleet: Fleet, rabbit: RabbitServer
) -> None:
    fleet.start("methods", "methods")
    async with opened(fleet) as services:
        tool = asyncio.create_task(call(services, "work", "T1", HELD))
        await started(fleet, "T1")
        worker_that_runs(fleet, "T1").kill()
        release(fleet)
        assert await tool == "T1"
        assert times(fleet, "start")["T1"] == 2
        fatal = asyncio.create_task(call(services, "die", "T-fatal", "exit"))
        for turn in range(1, 4):
            await eventually(lambda n=turn: times(fleet, "start")["T-fatal"] >= n, what=f"delivery {turn}")
            fleet.start("methods")
        with pytest.raises(OutcomeUnknownError):
            await fatal
        with services.app.connection_for_write() as connection:
            dead = connection.SimpleQueue(DEAD_QUEUE, queue_args={"x-queue-type": "quorum"})
            message = dead.get(timeout=5)
            message.ack()
            dead.close()
    assert message.headers["task"] == "tests.chaos.die" and "T-fatal" not in json.dumps(message.headers)


async def test_calls_survive_a_restart_of_the_node(fleet: Fleet, rabbit: RabbitServer) -> None:
    fleet.start("methods", concurrency=2)
    account = Account()
    async with opened(fleet) as services:
        tasks = [
            asyncio.create_task(account.follow(f"E{n}", call(services, "effect", f"E{n}", 0.5, seconds=120)))
            for n in range(20)
        ]
        await eventually(lambda: account.count >= 3, what="calls to end")
        await asyncio.to_thread(rabbit.kill)
        with pytest.raises((BrokerUnavailableError, OutcomeUnknownError)):
            await call(services, "work", "T-away")
        await asyncio.to_thread(rabbit.start)
        await asyncio.gather(*tasks)
        doubled, missing = await account.doubled_and_missing(services, fleet)
        assert await call(services, "work", "T-back") == "T-back"
    print(f"ok={len(account.ok)} errors={account.errors} unknown={account.unknown}")
    assert (account.wild, account.errors, doubled, missing) == ({}, {}, [], [])


async def test_full_queue_refuses_calls(
    make_chaos: Callable[..., Fleet], rabbit: RabbitServer, own_redis: Any
) -> None:
    fleet = make_chaos(
        "sqlite", broker_url=rabbit.url, results={"url": own_redis.url}, broker={"max_queued": 20}
    )
    publish_methods(fleet)
    account = Account()
    async with opened(fleet) as services:
        await asyncio.gather(
            *(account.follow(f"T{n}", call(services, "work", f"T{n}", seconds=8)) for n in range(30))
        )
    purge(fleet)
    kinds = [error.partition(":")[0] for error in account.errors.values()]
    assert kinds.count("OverloadedError") == 10 and kinds.count("CallTimeoutError") == 20


def message_of(app: NekroApp, queue: str) -> Any:
    return app.amqp.signed_task(new_id(), "tests.chaos.work", [], queue=queue)


def waiting_in(app: NekroApp, queue: str) -> int:
    with app.connection_for_write() as connection:
        return count_waiting(app.amqp.queues[queue], connection.default_channel)


@asynccontextmanager
async def publishing(fleet: Fleet, **broker: Any) -> AsyncIterator[tuple[NekroApp, KombuPublisher]]:
    """A publisher whose connection is open."""
    settings = fleet.settings.model_copy(update={"broker": fleet.settings.broker.model_copy(update=broker)})
    app = create_app(settings)
    publisher = KombuPublisher(app, settings.broker)
    await publisher.send(message_of(app, "long"), queue="long", may_repeat=False)
    try:
        yield app, publisher
    finally:
        with suppress(RuntimeError):  # a test has closed it
            await publisher.close()
        app.close()


async def test_a_message_that_a_frozen_server_did_not_get_is_not_sent_later(
    fleet: Fleet, rabbit: RabbitServer
) -> None:
    async with publishing(fleet) as (app, publisher):
        rabbit.freeze()
        try:
            with pytest.raises(BrokerUnavailableError) as refused:
                await publisher.send(message_of(app, "methods"), queue="methods", may_repeat=False)
            # Nor one whose caller has stopped waiting.
            late = asyncio.create_task(
                publisher.send(message_of(app, "methods"), queue="methods", may_repeat=False)
            )
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
        finally:
            rabbit.thaw()
        assert not isinstance(refused.value, PublishUnknownError)
        await publisher.close()  # after what the thread still does
        assert waiting_in(app, "methods") == 0


async def test_a_message_that_must_not_repeat_is_sent_once_to_a_server_that_froze(
    fleet: Fleet, rabbit: RabbitServer
) -> None:
    async with publishing(fleet, max_queued=0) as (app, publisher):
        rabbit.freeze()
        try:
            with pytest.raises(PublishUnknownError):
                await publisher.send(message_of(app, "long"), queue="long", may_repeat=False)
        finally:
            rabbit.thaw()
        await publisher.close()
        assert waiting_in(app, "long") == 2


async def test_a_connection_that_broke_while_it_was_not_used_is_replaced(
    fleet: Fleet, rabbit: RabbitServer
) -> None:
    def through(port: int) -> str:
        return rabbit.url.replace(str(rabbit.port), str(port))

    async with (
        RedisRelay(rabbit.port) as relay,
        publishing(fleet, url=through(relay.port)) as (app, publisher),
    ):
        for client in relay.clients:
            client.reset()
        await publisher.send(message_of(app, "methods"), queue="methods", may_repeat=False)
        assert await asyncio.to_thread(waiting_in, app, "methods") == 1


async def test_a_refusal_of_the_server_is_an_error_of_the_broker(fleet: Fleet) -> None:
    app = create_app(fleet.settings)
    with app.connection_for_write() as connection:
        Queue("methods", durable=True)(connection.default_channel).declare()  # a classic one
    publisher = KombuPublisher(app, fleet.settings.broker)
    with pytest.raises(BrokerUnavailableError, match="PRECONDITION_FAILED") as refused:
        await publisher.send(message_of(app, "methods"), queue="methods", may_repeat=False)
    assert not isinstance(refused.value, PublishUnknownError)
    await publisher.close()
    app.close()


async def test_threads_that_wait_for_a_frozen_server_end(fleet: Fleet, rabbit: RabbitServer) -> None:
    def of_publisher() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "nekro-publish" in thread.name]

    def announce() -> None:
        publish_round_requested(app, "chat")

    async with publishing(fleet) as (app, publisher):
        announce()
        rabbit.freeze()
        try:
            with pytest.raises(BrokerUnavailableError):
                await publisher.send(message_of(app, "methods"), queue="methods", may_repeat=False)
            with pytest.raises((OperationalError, OSError)):  # `nekro.app.chats.publisher` treats all alike
                await asyncio.wait_for(asyncio.to_thread(announce), WAIT_SECONDS)
            await asyncio.wait_for(publisher.close(), WAIT_SECONDS)
            await eventually(lambda: of_publisher() == [], what="the end of the publishing thread")
        finally:
            rabbit.thaw()
        announce()


async def test_a_caller_closes_while_its_server_does_not_answer(fleet: Fleet, rabbit: RabbitServer) -> None:
    app = create_app(fleet.settings)
    with app.pool.acquire() as connection:
        assert connection.default_channel.is_open
    rabbit.freeze()
    try:
        await asyncio.wait_for(asyncio.to_thread(app.close), WAIT_SECONDS)
    finally:
        rabbit.thaw()
    assert not connection.connected


async def test_worker_outlives_a_call_that_takes_longer_than_rabbitmq_allows(
    make_chaos: Callable[..., Fleet], own_redis: Any, tmp_path: Path
) -> None:
    """It connects again; the broker delivers the call again."""
    server = RabbitServer(
        tmp_path,
        ports=(free_port(), free_port(), free_port()),
        arguments="-rabbit consumer_timeout 5000 -rabbit channel_tick_interval 1000",
    )
    fleet = make_chaos("postgres", broker_url=server.url, results={"url": own_redis.url})
    try:
        server.start()
        [worker] = fleet.start("methods")
        async with opened(fleet) as services:
            held = asyncio.create_task(call(services, "effect", "E-held", HELD))
            await started(fleet, "E-held")
            await eventually(
                lambda: "PRECONDITION_FAILED" in worker.log.read_text(),
                what=lambda: f"a refused delivery\n{fleet.logs()}",
            )
            release(fleet)
            assert await held == "effect E-held"
            assert await call(services, "work", "T-next") == "T-next"
        assert worker.process.poll() is None, fleet.logs()
    finally:
        fleet.stop()
        server.close()
