"""Deliveries: no message is lost and none runs twice when workers or connections fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Consumer
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess, read_ledger

from broker_config.app import NekroApp, create_app
from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.broker.delivery.leases import RENEW, ack_commands
from nekro.broker.delivery.transport import DELIVERIES_HEADER, held_keys, seen_key

StartWorker = Callable[..., WorkerProcess]
Send = Callable[..., Any]

BOTH = pytest.mark.parametrize("pool", ["asyncio", pytest.param("threads", marks=pytest.mark.slow)])


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """Settings whose leases end soon."""
    return make_settings(broker={"visibility_timeout_seconds": 4})


def starts(settings: Settings) -> Counter[str]:
    """How often each task started."""
    return Counter(entry[0] for entry in read_ledger(settings) if entry[1] == "started")


def nothing_is_held(client: Any, settings: Settings, lane: str = "methods") -> bool:
    """Whether queue and held deliveries of a lane are empty."""
    prefix = settings.broker.key_prefix
    return not client.exists(f"{prefix}{lane}", f"{prefix}unacked.{lane}", f"{prefix}unacked.{lane}_index")


@pytest.mark.extended
@BOTH
def test_message_that_meets_a_dying_idle_worker_is_not_lost(
    pool: str, start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    worker = start_worker(pool)
    send("t.wait", 0).get(WAIT_SECONDS)  # it has started or is about to start the next blocking command
    worker.send(signal.SIGSTOP)
    results = [send("t.wait", 0) for _ in range(5)]
    worker.kill()
    start_worker(pool)
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")


@pytest.mark.extended
def test_lost_connection_runs_no_task_twice(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    worker = start_worker("asyncio", concurrency=8)
    results = [send("t.wait", 3) for _ in range(8)]
    wait_until(lambda: len(starts(settings)) == 8, what="the tasks to start")
    client.client_kill_filter(_type="normal", skipme=True)
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")
    assert set(starts(settings).values()) == {1}
    assert worker.process.poll() is None


def test_a_claim_in_flight_is_given_back_when_its_worker_stops(
    send: Send, client: Any, settings: Settings
) -> None:
    for _ in range(3):
        send("t.wait", 0)
    worker_app = create_app(settings, lane="methods")
    with contextlib.closing(worker_app), worker_app.connection_for_read() as connection:
        channel = connection.default_channel
        with Consumer(channel, queues=[worker_app.amqp.queues["methods"]], accept=["json"]):
            connection.transport.cycle.on_poll_start()  # sends the claim; its answer is read later
            prefix = settings.broker.key_prefix
            wait_until(lambda: client.hlen(f"{prefix}unacked.methods") == 3, what="the claim")
            channel.give_back_unread()
            assert client.llen(f"{prefix}methods") == 3
            assert not client.exists(f"{prefix}unacked.methods", f"{prefix}unacked.methods_index")
            assert not channel.qos.held()


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_worker_killed_while_it_acknowledges_leaves_no_record_behind(
    sent: int, send: Send, client: Any, settings: Settings
) -> None:
    send("t.wait", 0)
    prefix = settings.broker.key_prefix
    held, index = f"{prefix}unacked.methods", f"{prefix}unacked.methods_index"
    worker_app = create_app(settings, lane="methods")
    with contextlib.closing(worker_app), worker_app.connection_for_read() as connection:
        channel = connection.default_channel
        _, tag, _ = client.execute_command(*channel.claim_command(["methods"], 1))
        for command in ack_commands([(index, held, tag.decode())])[:sent]:
            client.execute_command(*command)
        client.zadd(index, {tag: 1}, xx=True)  # its lease has ended
        channel.qos.restore_visible()
    assert not client.exists(held, index)
    assert client.llen(f"{prefix}methods") == (0 if sent else 1)


def test_deliveries_whose_leases_expired_during_a_redis_outage_stay_with_their_holder(
    send: Send, client: Any, settings: Settings
) -> None:
    send("t.wait", 0)
    short = {"broker": settings.broker.model_copy(update={"visibility_timeout_seconds": 1.0})}
    worker_app = create_app(settings.model_copy(update=short), lane="methods")
    with contextlib.closing(worker_app), worker_app.connection_for_read() as connection:
        channel = connection.default_channel
        index, held = held_keys(channel)
        _, tag, _ = client.execute_command(*channel.claim_command(["methods"], 1))
        channel.qos.restore_visible()
        server = client.info("server")["process_id"]
        os.kill(server, signal.SIGSTOP)
        try:
            time.sleep(1.2)  # longer than the lease
        finally:
            os.kill(server, signal.SIGCONT)
        channel.qos.restore_visible()
        assert client.hlen(held) == 1, "its holder could not renew it"
        assert client.eval(RENEW, 2, index, seen_key(index), 1.0, tag) == []

        def is_restored() -> bool:
            channel.qos.restore_visible()
            return bool(client.llen(f"{settings.broker.key_prefix}methods") == 1)

        wait_until(is_restored, what="the delivery of a holder that could renew and did not")


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["asyncio", "threads"])
def test_a_method_that_ignores_cancellation_is_not_redelivered_while_its_process_lives(
    pool: str, start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    update = {"workers": settings.workers.model_copy(update={"drain_seconds": 0.2})}
    worker = start_worker(pool, settings=settings.model_copy(update=update))
    result = send("t.block", 15)
    wait_until(lambda: starts(settings)[result.id] == 1, what="the task to start")
    worker.send(signal.SIGTERM)
    worker.wait()
    assert client.llen(f"{settings.broker.key_prefix}methods") == 0, "it was given back while it ran"
    start_worker(pool)
    wait_until(lambda: starts(settings)[result.id] == 2, what="the second delivery, when its lease has ended")


@pytest.mark.extended
@BOTH
def test_task_longer_than_the_visibility_timeout_runs_once(
    pool: str, start_worker: StartWorker, send: Send, make_settings: Any, settings: Settings, client: Any
) -> None:
    short = settings.model_copy(
        update={"broker": settings.broker.model_copy(update={"visibility_timeout_seconds": 1.5})}
    )
    for _ in range(2):
        start_worker(pool, settings=short)
    assert send("t.wait", 4.5).get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")
    assert set(starts(settings).values()) == {1}


@BOTH
def test_task_of_a_killed_worker_is_redelivered(
    pool: str, start_worker: StartWorker, send: Send, settings: Settings
) -> None:
    worker = start_worker(pool)
    result = send("t.wait", 2)
    wait_until(lambda: starts(settings)[result.id] == 1, what="the task to start")
    worker.kill()
    start_worker(pool)
    assert result.get(WAIT_SECONDS) == "done"
    assert starts(settings)[result.id] == 2


def test_task_that_kills_its_workers_becomes_a_dead_letter(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings, app: NekroApp
) -> None:
    result = send("t.wait", 0)
    key = f"{settings.broker.key_prefix}methods"
    message = json.loads(client.rpop(key))
    message["headers"][DELIVERIES_HEADER] = settings.broker.max_deliveries
    client.lpush(key, json.dumps(message))
    start_worker("asyncio")
    with pytest.raises(Exception, match="3 workers took the call and none finished it"):
        result.get(WAIT_SECONDS)
    (dead,) = client.lrange(Keys(prefix=settings.broker.key_prefix).dead, 0, -1)
    assert json.loads(dead)["headers"]["id"] == result.id
    assert not starts(settings)
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgement")


@pytest.mark.slow
def test_each_delivery_to_a_dying_worker_is_counted(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    result = send("t.wait", 60)
    worker = start_worker("asyncio")
    wait_until(lambda: starts(settings)[result.id] == 1, what="the task to start")
    worker.kill()
    second = start_worker("asyncio")
    wait_until(lambda: starts(settings)[result.id] == 2, what="the second start")
    second.send(signal.SIGQUIT)
    second.wait()
    (raw,) = client.lrange(f"{settings.broker.key_prefix}methods", 0, -1)
    headers = json.loads(raw)["headers"]
    assert headers[DELIVERIES_HEADER] == 1, "a shutdown is not a fault of the task"


MALFORMED = [
    b"",
    b"garbage",
    b"\xff\xfe",
    b"[]",
    b"{}",
    b'{"properties": {}}',
    b'{"body": "x", "headers": [], "properties": {"delivery_info": {}}}',
    b'{"body": "%%%", "headers": {}, "properties": {"delivery_info": {}, "body_encoding": "base64"}}',
    b'{"body": "", "headers": {"task": []}, "properties": {"delivery_info": {}}}',
    b'{"body": "1", "headers": {"task": "t.wait"}, "content-type": "application/json",'
    b' "content-encoding": "utf-8", "properties": {"delivery_info": {}}}',
    b'{"body": "[1]", "headers": {"task": "t.wait", "id": "x"}, "content-type": "application/json",'
    b' "content-encoding": "utf-8", "properties": {"delivery_info": {}}}',
    b'{"body": "[[], {}, {}]", "headers": {"task": "t.wait", "id": 5, "expires": "never"},'
    b' "content-type": "application/json", "content-encoding": "utf-8", "properties": {"delivery_info": {}}}',
    b'{"body": "x", "headers": {"task": "t.wait", "id": "y"}, "properties": {"delivery_info": {}},'
    b' "content-type": "application/x-python-serialize", "content-encoding": "binary"}',
]


def test_malformed_messages_stop_no_worker_and_delay_no_others(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    key = f"{settings.broker.key_prefix}methods"
    for raw in MALFORMED:
        client.lpush(key, raw)
    result = send("t.wait", 0)
    worker = start_worker("asyncio", concurrency=2)
    assert result.get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_held(client, settings), what="every message to be dealt with")
    assert worker.process.poll() is None
    assert client.llen(Keys(prefix=settings.broker.key_prefix).dead) == 7, "the others were answered"
    assert "Unrecoverable" not in worker.log.read_text()


def test_garbage_among_held_deliveries_becomes_a_dead_letter(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    prefix = settings.broker.key_prefix
    for tag, record in (("a", b"garbage"), ("b", b"[1]"), ("c", b'[{"headers": 1}, "", "methods"]')):
        client.hset(f"{prefix}unacked.methods", tag, record)
        client.zadd(f"{prefix}unacked.methods_index", {tag: 1})
    start_worker("asyncio")
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_held(client, settings), what="the garbage to go")
    assert client.llen(Keys(prefix=prefix).dead) == 3


@pytest.mark.extended
def test_one_worker_serves_several_queues(
    start_worker: StartWorker, app: NekroApp, settings: Settings, make_settings: Any
) -> None:
    pinned = settings.model_copy(
        update={
            "workers": settings.workers.model_copy(update={"pinned_plugins": ("a.one", "a.two", "a.three")})
        }
    )
    caller = create_app(pinned)
    queues = [f"pinned.{key}" for key in pinned.workers.pinned_plugins]
    start_worker("asyncio", settings=pinned, lane=",".join(queues))
    results = [caller.send_task("t.wait", [0], queue=queue) for queue in queues * 20]
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    caller.backend.result_consumer.stop()
    caller.close()


@pytest.mark.extended
def test_workers_continue_after_redis_was_out_of_memory(
    own_redis: Any, make_settings: Callable[..., Settings], start_worker: StartWorker
) -> None:
    settings = make_settings(broker={"url": own_redis.url})
    caller = create_app(settings)
    worker = start_worker("asyncio", settings=settings)
    running = caller.send_task("t.wait", [3], queue="methods")
    wait_until(lambda: len(starts(settings)) == 1, what="the task to start")
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", 1)
        client.config_set("maxmemory-policy", "noeviction")
        worker.wait_log("messages_refused_by_redis")
        client.config_set("maxmemory", 0)
    assert running.get(WAIT_SECONDS) == "done"
    assert caller.send_task("t.wait", [0], queue="methods").get(WAIT_SECONDS) == "done"
    assert set(starts(settings).values()) == {1}
    caller.backend.result_consumer.stop()
    caller.close()


@pytest.mark.extended
def test_worker_and_its_tasks_survive_a_restart_of_redis(
    own_redis: Any, make_settings: Callable[..., Settings], start_worker: StartWorker
) -> None:
    server = own_redis
    server.stop()
    server.append_only = True
    server.start()
    settings = make_settings(broker={"url": server.url})
    caller = create_app(settings)
    start_worker("asyncio", concurrency=4, settings=settings)
    results = [caller.send_task("t.wait", [1], queue="methods") for _ in range(12)]
    wait_until(lambda: len(starts(settings)) >= 4, what="the first tasks to start")
    server.kill()
    server.start()
    with redis.Redis.from_url(server.url) as client:
        wait_until(
            lambda: all(client.exists(caller.backend.get_key_for_task(result.id)) for result in results),
            what="all results",
        )
        wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")
    assert set(starts(settings).values()) == {1}
    assert len(starts(settings)) == 12
    caller.close()


@pytest.mark.slow
def test_rolling_kills_lose_no_call(
    start_worker: StartWorker, send: Send, settings: Settings, client: Any
) -> None:
    """1,000 tasks under 12 SIGKILLs: each is answered."""
    # A task may happen to be held by three killed workers.
    patient = settings.model_copy(
        update={"broker": settings.broker.model_copy(update={"max_deliveries": 100})}
    )
    workers = [start_worker("asyncio", concurrency=20, settings=patient) for _ in range(2)]
    results = [send("t.wait", 0.1) for _ in range(1000)]
    for turn in range(12):
        finished = turn * 60
        wait_until(
            lambda n=finished: len([e for e in read_ledger(settings) if e[1] == "finished"]) >= n,
            what=f"{finished} tasks to finish",
        )
        workers[turn % 2].kill()
        workers[turn % 2] = start_worker("asyncio", concurrency=20, settings=patient)
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")
