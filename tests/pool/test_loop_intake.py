"""Ordinary messages are received on the loop of their tasks, unusual ones by the consumer; none is lost."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Consumer
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess, read_ledger

from broker_config.app import NekroApp, create_app
from broker_config.keys import Keys
from broker_config.primaries import Primary
from broker_config.settings import Settings
from nekro.base.loop_thread import LoopThread
from nekro.broker.delivery.intake import LONG_BYTES, LoopIntake
from nekro.broker.delivery.leases import DeliveryKeeper
from nekro.broker.delivery.transport import DELIVERIES_HEADER
from nekro.broker.publishing import encode_message
from nekro.wire.invocation import new_id

StartWorker = Callable[..., WorkerProcess]
Send = Callable[..., Any]
Change = Callable[[dict[str, Any]], object]

LOOP, HUB = "nekro-pool", "MainThread"


def starts(settings: Settings) -> list[str]:
    """The calls whose methods started, in order."""
    return [entry[0] for entry in read_ledger(settings) if entry[1] == "started"]


def waiting(client: Any, settings: Settings, lane: str = "methods") -> int:
    """Number of queued messages."""
    return int(client.llen(f"{settings.broker.key_prefix}{lane}"))


def held(client: Any, settings: Settings, lane: str = "methods") -> int:
    """Number of messages that the workers of a lane hold."""
    return int(client.hlen(f"{settings.broker.key_prefix}unacked.{lane}"))


def nothing_is_left(client: Any, settings: Settings) -> bool:
    """Whether every message is acknowledged."""
    return not waiting(client, settings) and not held(client, settings)


def push(client: Any, app: NekroApp, settings: Settings, change: Change, name: str = "f.run") -> Any:
    """Queue a message with changed headers; returns the result of its task."""
    task_id = new_id()
    raw = json.loads(
        encode_message(
            app.amqp.create_task_message(task_id, name, [{"how": "ok"}], reply_to="a" * 32), queue="methods"
        )
    )
    change(raw)
    client.lpush(f"{settings.broker.key_prefix}methods", json.dumps(raw))
    return app.AsyncResult(task_id)


def headers(**fields: Any) -> Change:
    """A change of a message's headers."""
    return lambda raw: raw["headers"].update(fields)


@pytest.mark.parametrize("pool", ["asyncio", "threads"])
def test_a_task_that_was_registered_late_is_not_answered_as_unknown(
    start_worker: StartWorker, send: Send, pool: str
) -> None:
    """The hub takes up a new task after it was registered; a message that arrives between waits."""
    start_worker(pool)
    send("t.register", "t.late").get(WAIT_SECONDS)
    early = send("t.late")
    send("t.wait", 0).get(WAIT_SECONDS)  # behind it in the queue
    send("t.serve").get(WAIT_SECONDS)
    assert early.get(WAIT_SECONDS) == "late"


@pytest.mark.extended
def test_unusual_messages_are_handled_by_the_consumer_with_the_usual_outcome(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings, app: NekroApp
) -> None:
    worker = start_worker("asyncio")
    send("t.watch_intake").get(WAIT_SECONDS)
    body = {"how": "ok", "value": 1}
    threads = {
        send("f.run", body): LOOP,
        send("t.wait", 0): LOOP,
    }
    for result in threads:
        assert result.get(WAIT_SECONDS) in (1, "done")
    taken = send("t.taken").get(WAIT_SECONDS)
    assert {result.id: taken[result.id] for result in threads} == {
        result.id: thread for result, thread in threads.items()
    }

    revoked = new_id()
    app.control.revoke(revoked)
    wait_until(
        lambda: any(revoked in ids for ids in (app.control.inspect(limit=1).revoked() or {}).values()),
        what="the worker to know of the revocation",
    )
    refused: list[tuple[Any, str, str]] = [
        (send("f.run", body, task_id=revoked), "TaskRevokedError", "revoked"),
        (send("no.such.task"), "NotRegistered", "no.such.task"),
        (
            push(client, app, settings, headers(timelimit="soon")),
            "MessageRefusedError",
            "not a pair",
        ),
        (push(client, app, settings, headers(task="t.wait")), "MessageRefusedError", "does not match"),
        (
            push(client, app, settings, lambda raw: raw.update({"body": "bm8gSlNPTg=="})),
            "MessageRefusedError",
            "cannot be decoded",
        ),
        (
            push(
                client,
                app,
                settings,
                lambda raw: raw.update({"content-type": "application/x-python-serialize"}),
            ),
            "MessageRefusedError",
            "only JSON in UTF-8",
        ),
        (
            push(client, app, settings, headers(**{DELIVERIES_HEADER: settings.broker.max_deliveries})),
            "OutcomeUnknownError",
            "3 workers took the call",
        ),
    ]
    client.lpush(f"{settings.broker.key_prefix}methods", b"garbage")
    for result, kind, text in refused:
        with pytest.raises(Exception) as caught:
            result.get(WAIT_SECONDS)
        assert text in str(caught.value)
        assert type(caught.value).__name__ == kind
    wait_until(lambda: nothing_is_left(client, settings), what="the acknowledgements")
    assert not set(starts(settings)) & {result.id for result, _, _ in refused}
    assert client.llen(Keys(prefix=settings.broker.key_prefix).dead) == 2, "the poisonous and the unreadable"
    assert send("f.run", body).get(WAIT_SECONDS) == 1
    assert worker.process.poll() is None


@pytest.mark.extended
def test_calls_of_a_rate_limited_task_are_handled_by_the_consumer(
    start_worker: StartWorker, send: Send, app: NekroApp
) -> None:
    """Celery delays them with the consumer's timers, which belong to one thread."""
    start_worker("asyncio")
    send("t.watch_intake").get(WAIT_SECONDS)
    for limit, thread in (("1000/s", HUB), ("0", LOOP)):
        assert app.control.rate_limit("f.run", limit, reply=True, limit=1, timeout=WAIT_SECONDS)
        result = send("f.run", {"how": "ok", "value": 1})
        assert result.get(WAIT_SECONDS) == 1
        assert send("t.taken").get(WAIT_SECONDS)[result.id] == thread, limit


@pytest.mark.extended
@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("pool", ["asyncio", "threads"])
def test_two_queues_are_served_alternately(
    pool: str, concurrency: int, start_worker: StartWorker, settings: Settings
) -> None:
    pinned = settings.model_copy(
        update={"workers": settings.workers.model_copy(update={"pinned_plugins": ("a.one", "a.two")})}
    )
    caller = create_app(pinned)
    queues = [f"pinned.{key}" for key in pinned.workers.pinned_plugins]
    queue_of = {
        caller.send_task("f.run", [{"how": "ok"}], queue=queue).id: queue
        for queue in queues
        for _ in range(40)
    }
    start_worker(pool, settings=pinned, lane=",".join(queues), concurrency=concurrency)
    order = wait_until(
        lambda: len(found := starts(settings)) == len(queue_of) and found, what="every call to start"
    )
    assert len(set(order)) == len(queue_of)
    early = Counter(queue_of[task_id] for task_id in order[:40])
    assert min(early[queue] for queue in queues) >= 10
    caller.close()


@pytest.mark.extended
def test_queues_are_cancelled_and_added_at_run_time(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings, app: NekroApp
) -> None:
    start_worker("asyncio")
    body = {"how": "ok", "value": 1}
    assert send("f.run", body).get(WAIT_SECONDS) == 1
    assert app.control.cancel_consumer("methods", reply=True, limit=1, timeout=WAIT_SECONDS)
    # The reply comes before the queue is cancelled.
    inspect = app.control.inspect(limit=1, timeout=WAIT_SECONDS)
    wait_until(lambda: list((inspect.active_queues() or {}).values()) == [[]], what="the queue to be left")
    left = [send("f.run", body) for _ in range(3)]
    assert app.control.add_consumer("long", reply=True, limit=1, timeout=WAIT_SECONDS)
    for _ in range(3):
        assert send("f.run", body, queue="long").get(WAIT_SECONDS) == 1
    assert waiting(client, settings) == 3, "that queue has no consumer"
    assert app.control.add_consumer("methods", reply=True, limit=1, timeout=WAIT_SECONDS)
    for result in left:
        assert result.get(WAIT_SECONDS) == 1
    wait_until(lambda: nothing_is_left(client, settings), what="the acknowledgements")
    assert set(Counter(starts(settings)).values()) == {1}


@pytest.mark.extended
@pytest.mark.parametrize("is_cut", [False, True], ids=["", "after_a_cut"])
def test_the_concurrency_limits_claims_and_each_end_allows_one_more(
    is_cut: bool, start_worker: StartWorker, send: Send, client: Any, settings: Settings, tmp_path: Path
) -> None:
    worker = start_worker("asyncio", concurrency=3)
    if is_cut:
        assert send("f.run", {"how": "ok", "value": 1}).get(WAIT_SECONDS) == 1
        client.client_kill_filter(_type="normal", skipme=True)
        worker.wait_log("Connection to broker lost")
        assert send("f.run", {"how": "ok", "value": 1}).get(WAIT_SECONDS) == 1
        wait_until(lambda: nothing_is_left(client, settings), what="the acknowledgement")
    before = len(starts(settings))
    ends = [tmp_path / str(number) for number in range(10)]
    results = [send("f.run", {"how": "until", "path": str(end)}) for end in ends]
    for running in range(3, 7):
        wait_until(lambda n=running: len(starts(settings)) == before + n, what=f"{running} calls to start")
        wait_until(lambda: held(client, settings) == 3, what="the acknowledgement")
        assert waiting(client, settings) == 10 - running
        ends[running - 3].touch()
    for end in ends:
        end.touch()
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_left(client, settings), what="the acknowledgements")
    assert set(Counter(starts(settings)).values()) == {1}


@pytest.mark.extended
@pytest.mark.parametrize("keeps_data", [True, False], ids=["with_data", "empty"])
def test_calls_survive_a_restart_of_redis(
    keeps_data: bool,
    own_redis: Any,
    make_settings: Callable[..., Settings],
    start_worker: StartWorker,
    tmp_path: Path,
) -> None:
    own_redis.stop()
    own_redis.append_only = keeps_data
    own_redis.start()
    settings = make_settings(broker={"url": own_redis.url})
    caller = create_app(settings)
    worker = start_worker("asyncio", concurrency=4, settings=settings)
    end = tmp_path / "end"
    # An empty Redis has lost the queued messages.
    count = 12 if keeps_data else 4
    results = [
        caller.send_task("f.run", [{"how": "until", "path": str(end)}], queue="methods") for _ in range(count)
    ]
    wait_until(lambda: len(starts(settings)) == 4, what="the first calls to start")
    first = starts(settings)
    own_redis.kill()
    worker.wait_log("Connection to broker lost")
    own_redis.start()
    end.touch()
    with redis.Redis.from_url(own_redis.url) as client:
        keys = [caller.backend.get_key_for_task(result.id) for result in results]
        wait_until(lambda: client.exists(*keys) == len(keys), what="the results")
        wait_until(lambda: nothing_is_left(client, settings), what="the acknowledgements")
    late = caller.send_task("f.run", [{"how": "ok", "value": "late"}], queue="methods")
    assert late.get(WAIT_SECONDS) == "late"
    expected = {result.id for result in results} | {late.id} if keeps_data else {late.id}
    assert Counter(starts(settings)) == Counter(expected)
    assert set(first) <= {result.id for result in results}
    assert worker.process.poll() is None
    caller.backend.result_consumer.stop()
    caller.close()


@pytest.mark.extended
def test_graceful_shutdown_gives_back_claimed_messages_that_have_not_started(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings, tmp_path: Path
) -> None:
    worker = start_worker("asyncio", "--prefetch-multiplier", "4", "-l", "DEBUG", concurrency=2)
    end = tmp_path / "end"
    results = [send("f.run", {"how": "until", "path": str(end)}) for _ in range(12)]
    wait_until(lambda: held(client, settings) == 8 and len(starts(settings)) == 2, what="the claims")
    worker.send(signal.SIGTERM)
    worker.wait_log("Stopping Pool")  # no message is taken after this
    end.touch()
    assert worker.wait() == 0
    assert held(client, settings) == 0
    assert waiting(client, settings) == 12 - len(starts(settings)) >= 4
    given_back = [
        json.loads(raw)["headers"] for raw in client.lrange(f"{settings.broker.key_prefix}methods", 0, -1)
    ]
    assert not any(DELIVERIES_HEADER in header for header in given_back), (
        "a shutdown is not a failed delivery"
    )
    start_worker("asyncio")
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    assert Counter(starts(settings)) == Counter(result.id for result in results)


@pytest.mark.extended
def test_shutdown_under_load_loses_no_call_and_runs_none_twice(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    workers = [start_worker("asyncio", concurrency=16, wait=False) for _ in range(3)]
    for worker in workers:
        worker.wait_ready()
    results = []
    for worker, enough in zip(workers, (100, 400), strict=False):
        results += [send("f.run", {"how": "wait", "seconds": 0.01}) for _ in range(300)]
        wait_until(lambda n=enough: len(starts(settings)) >= n, what=f"{enough} calls to start")
        worker.send(signal.SIGTERM)
    for worker in workers[:2]:
        assert worker.wait() == 0
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"
    wait_until(lambda: nothing_is_left(client, settings), what="the acknowledgements")
    assert Counter(starts(settings)) == Counter(result.id for result in results)


def test_blocked_loop_does_not_block_remote_control(
    start_worker: StartWorker, send: Send, settings: Settings, app: NekroApp, tmp_path: Path
) -> None:
    start_worker("asyncio")
    end = tmp_path / "end"
    result = send("f.run", {"how": "block", "path": str(end)})
    wait_until(lambda: result.id in starts(settings), what="the call to block the loop")
    inspect = app.control.inspect(timeout=WAIT_SECONDS, limit=1)
    assert [answer["ok"] for answer in inspect.ping().values()] == ["pong"]
    ((active,),) = inspect.active().values()
    assert active["id"] == result.id
    end.touch()
    assert result.get(WAIT_SECONDS) == "done"


class SlowClaim:
    """An intake in this process whose claim of three messages is in flight until ``end`` is called."""

    def __init__(self, server: Any, settings: Settings, *, padding: str) -> None:
        self._app = create_app(settings, lane="methods")
        for number in range(3):
            self._app.send_task("f.run", [number, padding], queue="methods")
        self._client = redis.Redis.from_url(server.url)
        self._connection = self._app.connection_for_read()
        channel = self._connection.default_channel
        self.delivered: list[Any] = []
        #: Iterations of the loop, and their number at each delivery.
        self.turns = 0
        self.turns_at_delivery: list[int] = []
        queues = [self._app.amqp.queues["methods"]]
        self.consumer = Consumer(channel, queues, accept=["json"], on_message=self._deliver)
        self.consumer.consume()
        self._thread = LoopThread("test-loop")
        keeper = DeliveryKeeper(
            self._client, Primary(None), visibility_timeout_seconds=channel.visibility_timeout
        )
        self.intake = channel.intake = LoopIntake(
            channel, self._thread.loop, keeper=keeper, settings=settings.broker
        )

    def _deliver(self, message: Any) -> None:
        self.turns_at_delivery.append(self.turns)
        self.delivered.append(message)

    def count_turns(self) -> None:
        """Count the loop's iterations until all messages are delivered."""
        self.turns += 1
        if len(self.delivered) < 3:
            self._thread.loop.call_soon(self.count_turns)

    def begin(self) -> None:
        """Send the claim to a Redis that executes no writing command."""
        self._client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        self._thread.start()
        self.intake.start()
        wait_until(
            lambda: any(each["cmd"] == "eval" for each in self._client.client_list()), what="the claim"
        )

    def end(self) -> None:
        """Let Redis execute it."""
        self._thread.call(self.count_turns)
        self._client.execute_command("CLIENT", "UNPAUSE")

    def close(self) -> None:
        self.end()
        self.intake.stop()
        self._thread.stop()
        self._connection.close()
        self._client.close()
        self._app.close()


@pytest.fixture
def slow_claim(own_redis: Any, settings: Settings, request: pytest.FixtureRequest) -> Iterator[SlowClaim]:
    """A claim in flight; its messages are short unless a test requests padding."""
    own = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": own_redis.url})})
    claim = SlowClaim(own_redis, own, padding=getattr(request, "param", ""))
    claim.begin()
    yield claim
    claim.close()


@pytest.fixture
def own_client(own_redis: Any) -> Iterator[redis.Redis]:
    """A client of the server that receives the slow claim."""
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


def test_messages_claimed_during_a_stop_are_given_back(
    slow_claim: SlowClaim, own_client: redis.Redis, settings: Settings
) -> None:
    stopping = threading.Thread(target=slow_claim.intake.stop)
    stopping.start()
    wait_until(lambda: slow_claim.intake._is_stopping, what="the stop to begin")
    slow_claim.end()
    stopping.join(WAIT_SECONDS)
    assert not stopping.is_alive()
    assert own_client.info("commandstats")["cmdstat_eval"]["calls"] == 1, "the claim was executed"
    assert (waiting(own_client, settings), held(own_client, settings)) == (3, 0)
    assert not slow_claim.delivered


def test_a_stop_after_the_loop_was_closed_is_no_fault(
    app: NekroApp, settings: Settings, client: redis.Redis, logged: list[tuple[str, dict[str, Any]]]
) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        keeper = DeliveryKeeper(client, Primary(None), visibility_timeout_seconds=channel.visibility_timeout)
        LoopIntake(channel, loop, keeper=keeper, settings=settings.broker).stop()
    gc.collect()  # of a coroutine that was not awaited, which is a warning
    assert logged == []


def test_messages_claimed_from_a_cancelled_queue_are_given_back_at_once(
    slow_claim: SlowClaim, own_client: redis.Redis, settings: Settings
) -> None:
    slow_claim.consumer.cancel_by_queue("methods")
    slow_claim.end()
    wait_until(
        lambda: "cmdstat_eval" in own_client.info("commandstats") and waiting(own_client, settings) == 3,
        what="the messages on their queue",
    )
    assert held(own_client, settings) == 0
    assert not slow_claim.delivered


def test_claimed_messages_are_delivered(
    slow_claim: SlowClaim, own_client: redis.Redis, settings: Settings
) -> None:
    slow_claim.end()
    wait_until(lambda: len(slow_claim.delivered) == 3, what="the messages")
    assert (waiting(own_client, settings), held(own_client, settings)) == (0, 3)


@pytest.mark.parametrize("slow_claim", ["x" * LONG_BYTES], indirect=True)
def test_the_loop_runs_between_the_decoding_steps_of_long_messages(
    slow_claim: SlowClaim, own_client: redis.Redis, settings: Settings
) -> None:
    slow_claim.end()
    wait_until(lambda: len(slow_claim.delivered) == 3, what="the messages")
    assert [message.payload[0][0] for message in slow_claim.delivered] == [0, 1, 2], "in their order"
    turns = slow_claim.turns_at_delivery
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(turns))
    assert held(own_client, settings) == 3


def test_a_decoded_body_is_used_for_its_own_message_only(app: NekroApp) -> None:
    def raw(word: str, **extra: Any) -> bytes:
        message = app.amqp.create_task_message(new_id(), "m.noop", [word])
        return json.dumps(json.loads(encode_message(message, queue="methods")) | extra).encode()

    with app.connection_for_read() as connection:
        channel = connection.default_channel
        delivered: list[Any] = []
        queues = [app.amqp.queues["methods"]]
        Consumer(channel, queues, accept=["json"], on_message=delivered.append).consume()
        first, second = raw("first"), raw("second")
        forged = raw("third", **{"nekro decoded": [["forged"], {}, {}]})
        for unreadable in (b"{", b"[]", json.dumps({"body": "{"}).encode()):
            channel.predecode(unreadable)
            channel.predecode_body()
        channel.predecode(first)
        channel.predecode_body()
        channel._take("methods", "tag.1", second)  # another worker acknowledged the first one earlier
        channel._take("methods", "tag.2", first)
        channel.predecode(forged)
        channel.predecode_body()
        channel._take("methods", "tag.3", forged)
        channel.predecode(raw("of another encoding", properties={"body_encoding": "base64"}))
        channel.predecode_body()
        assert [message.payload[0] for message in delivered] == [["second"], ["first"], ["third"]]
        assert [message.delivery_tag for message in delivered] == ["tag.1", "tag.2", "tag.3"]
        for message in delivered:
            message.channel.qos.ack(message.delivery_tag)
