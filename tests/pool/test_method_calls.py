"""Calls from an event loop to a real worker and back: answers, errors, deadlines, a failing Redis."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
import uvloop
from waiting import WAIT_SECONDS, eventually, wait_until
from worker_process import WorkerProcess

from broker_config.app import NekroApp, create_app
from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.broker.calls import MethodCaller
from nekro.broker.celery.result_backend import MAX_ANNOUNCED_BYTES
from nekro.broker.fairness import LARGE_CHARS
from nekro.broker.publishing import encode_message
from nekro.wire.invocation import Invocation, new_id
from nekro_agent.errors import (
    BrokerUnavailableError,
    CallCancelledError,
    CallTimeoutError,
    MessageRefusedError,
    MethodDisabledError,
    MethodFailedError,
    MethodNotFoundError,
    OutcomeUnknownError,
)
from nekro_agent.methods import Lane

StartWorker = Callable[..., WorkerProcess]


def invocation(method: str, args: str = "", *, seconds: float = 10) -> Invocation:
    """A call with a deadline."""
    now = datetime.now(UTC)
    return Invocation(
        call_id=new_id(),
        method=method,
        chat_key="c",
        container_key="k",
        issued_at=now,
        deadline=now + timedelta(seconds=seconds),
        args=args,
    )


@pytest.fixture
async def caller(app: NekroApp, settings: Settings) -> AsyncIterator[MethodCaller]:
    """A caller on the test's loop."""
    async with MethodCaller(app, settings) as caller:
        yield caller


@pytest.fixture
def worker(start_worker: StartWorker) -> WorkerProcess:
    """A worker with a high concurrency."""
    return start_worker("asyncio", concurrency=200)


def keys_under(settings: Settings) -> set[str]:
    assert settings.broker.url
    with redis.Redis.from_url(settings.broker.url) as client:
        return {key.decode() for key in client.keys(f"{settings.broker.key_prefix}*")}


@pytest.mark.extended
async def test_many_calls_each_get_their_own_answer(caller: MethodCaller, worker: WorkerProcess) -> None:
    calls = [invocation("m.noop") for _ in range(300)]
    answers = await asyncio.gather(*(caller.call(call, lane=Lane.METHODS) for call in calls))
    assert [answer.call_id for answer in answers] == [call.call_id for call in calls]
    assert {answer.text for answer in answers} == {"x"}


async def test_a_chats_large_call_is_delayed_by_its_last_ones_and_other_calls_are_not(
    caller: MethodCaller, worker: WorkerProcess
) -> None:
    large = "x" * (LARGE_CHARS + 1)
    for _ in range(100):  # far longer than this test takes
        caller._pace.spent("c", 60)
    waiting = asyncio.create_task(caller.call(invocation("m.noop", large, seconds=120), lane=Lane.METHODS))
    await caller.call(invocation("m.noop"), lane=Lane.METHODS)
    of_another = invocation("m.noop", large).model_copy(update={"chat_key": "d"})
    await caller.call(of_another, lane=Lane.METHODS)
    assert not waiting.done()
    assert "d" in caller._pace._free_at, "large messages are charged"
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_large_value_arrives_whole(caller: MethodCaller, worker: WorkerProcess) -> None:
    answer = await caller.call(invocation("m.big"), lane="methods")
    assert answer.value is not None
    assert len(answer.value) == 4 << 20


async def test_failures_become_errors_with_their_cause(caller: MethodCaller, worker: WorkerProcess) -> None:
    with pytest.raises(MethodDisabledError, match=r"plugin a\.b is disabled"):
        await caller.call(invocation("m.fail", "ours"), lane=Lane.METHODS)
    with pytest.raises(MethodFailedError) as caught:
        await caller.call(invocation("m.fail", "empty"), lane=Lane.METHODS)
    assert (caught.value.error_type, caught.value.error_message) == ("ValueError", "")
    with pytest.raises(MethodFailedError, match=r"^Weird: one, 2$"):
        await caller.call(invocation("m.fail", "weird"), lane=Lane.METHODS)
    with pytest.raises(MethodNotFoundError, match=r"m\.unknown"):
        await caller.call(invocation("m.unknown"), lane=Lane.METHODS)
    with pytest.raises(MessageRefusedError, match="invalid envelope"):
        await caller.call(invocation("m.garbage"), lane=Lane.METHODS)
    with pytest.raises(KeyError):
        await caller.call(invocation("m.noop"), lane="no-such-queue")


async def test_call_ends_at_its_deadline_and_its_task_is_stopped(
    caller: MethodCaller, worker: WorkerProcess
) -> None:
    call = invocation("m.wait", "60", seconds=4)
    with pytest.raises(CallTimeoutError):
        await caller.call(call, lane=Lane.METHODS)
    await asyncio.to_thread(
        wait_until,
        lambda: f"m.wait[{call.call_id}]" in worker.log.read_text().replace("succeeded", ""),
        what="the worker to log the end",
    )
    answer = await caller.call(invocation("m.noop"), lane=Lane.METHODS)
    assert answer.text == "x"


async def test_call_past_its_deadline_is_not_sent(caller: MethodCaller, settings: Settings) -> None:
    with pytest.raises(CallTimeoutError, match="has passed"):
        await caller.call(invocation("m.noop", seconds=-1), lane=Lane.METHODS)
    assert f"{settings.broker.key_prefix}methods" not in keys_under(settings)


async def test_call_that_expired_in_the_queue_never_runs(
    caller: MethodCaller, settings: Settings, start_worker: StartWorker
) -> None:
    with pytest.raises(CallTimeoutError):
        await caller.call(invocation("m.wait", "0", seconds=0.3), lane=Lane.METHODS)
    worker = await asyncio.to_thread(start_worker, "asyncio")
    await caller.call(invocation("m.noop"), lane=Lane.METHODS)
    assert worker.ledger() == []


async def test_cancelling_the_wait_revokes_the_call(caller: MethodCaller, settings: Settings) -> None:
    call = invocation("m.noop", seconds=60)
    waiting = asyncio.create_task(caller.call(call, lane="long"))  # the lane has no consumer
    queued = f"{settings.broker.key_prefix}long"
    await eventually(lambda: queued in keys_under(settings), what="the message")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with redis.Redis.from_url(settings.broker.url or "") as client:
        revoked = client.zscore(Keys(prefix=settings.broker.key_prefix).revoked, call.call_id)
    assert revoked is not None


@pytest.mark.extended
async def test_revoked_call_ends_with_an_error_for_its_caller(
    caller: MethodCaller, worker: WorkerProcess
) -> None:
    call = invocation("m.wait", "60")
    waiting = asyncio.create_task(caller.call(call, lane=Lane.METHODS))
    await asyncio.to_thread(
        wait_until, lambda: [call.call_id, "started"] in worker.ledger(), what="the call to start"
    )
    await caller.revoke(call.call_id)
    with pytest.raises(CallCancelledError):
        await waiting


async def test_undecodable_message_is_answered_with_an_error(
    app: NekroApp, caller: MethodCaller, worker: WorkerProcess, settings: Settings
) -> None:
    call = invocation("m.noop", seconds=60)
    waiting = asyncio.create_task(caller.call(call, lane="long"))  # the lane has no consumer
    await asyncio.sleep(0)
    message = app.amqp.create_task_message(call.call_id, "m.noop", [1], reply_to=caller._caller_id)
    raw = json.loads(encode_message(message, queue="methods"))
    raw["content-type"] = "application/x-python-serialize"
    assert settings.broker.url
    with redis.Redis.from_url(settings.broker.url) as client:
        client.lpush(f"{settings.broker.key_prefix}methods", json.dumps(raw))
    with pytest.raises(MessageRefusedError, match="only JSON"):
        await waiting


async def test_second_call_of_one_id_is_refused(caller: MethodCaller) -> None:
    call = invocation("m.noop", seconds=1)
    waiting = asyncio.create_task(caller.call(call, lane="long"))
    await asyncio.sleep(0)
    with pytest.raises(MessageRefusedError, match="already in progress"):
        await caller.call(call, lane="long")
    with pytest.raises(CallTimeoutError):
        await waiting


async def test_closed_caller_leaves_no_keys(app: NekroApp, settings: Settings, worker: WorkerProcess) -> None:
    async with MethodCaller(app, settings) as caller:
        await caller.call(invocation("m.noop"), lane=Lane.METHODS)
        orphan = asyncio.create_task(caller.call(invocation("m.wait", "0.2"), lane=Lane.METHODS))
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await orphan
    left = keys_under(settings)
    assert not [key for key in left if "reply:" in key]
    with redis.Redis.from_url(settings.broker.url or "") as client:
        results = [key for key in left if "celery-task-meta" in key]
        assert results
        assert all(client.ttl(key) > 0 for key in results)


async def test_a_result_without_announcement_is_read_under_its_key(
    caller: MethodCaller, worker: WorkerProcess
) -> None:
    """As when the connection breaks, or a worker of an older release pushes the result to a list."""
    assert caller._servers is not None
    caller._tasks[1].cancel()
    caller._servers._subscriptions[0].abort()
    call = invocation("m.wait", "0.3")
    answer = await caller.call(call, lane=Lane.METHODS)
    assert answer.call_id == call.call_id


@pytest.mark.extended
async def test_results_are_announced_to_a_subscribed_caller(
    caller: MethodCaller, worker: WorkerProcess, settings: Settings
) -> None:
    assert caller._servers is not None
    subscription = caller._servers._subscriptions[0]
    await eventually(lambda: subscription.stands, what="the subscription")
    caller._tasks[0].cancel()  # results of old calls are not read
    answers = await asyncio.gather(*(caller.call(invocation("m.noop"), lane=Lane.METHODS) for _ in range(50)))
    assert {answer.text for answer in answers} == {"x"}
    long = "x" * MAX_ANNOUNCED_BYTES
    assert (await caller.call(invocation("m.echo", long), lane=Lane.METHODS)).text == long
    assert not [key for key in keys_under(settings) if "reply:" in key]


async def test_results_before_the_first_subscription_are_read_after_it(
    app: NekroApp, settings: Settings, worker: WorkerProcess
) -> None:
    async with MethodCaller(app, settings) as caller:
        assert caller._servers is not None
        for task in caller._tasks:
            task.cancel()
        call = invocation("m.noop")
        waiting = asyncio.create_task(caller.call(call, lane=Lane.METHODS))
        key = app.backend.get_key_for_task(call.call_id).decode()
        await eventually(lambda: key in keys_under(settings), what="the result")
        caller._tasks = [asyncio.create_task(caller._servers._subscriptions[0].listen())]
        assert (await waiting).call_id == call.call_id


async def test_a_caller_whose_subscription_is_cut_gets_its_answers(
    caller: MethodCaller, worker: WorkerProcess, settings: Settings
) -> None:
    subscription = caller._servers._subscriptions[0]
    assert subscription is not None
    with redis.Redis.from_url(settings.broker.url or "") as client:
        await eventually(lambda: subscription.stands, what="the subscription")
        calls = [
            asyncio.create_task(caller.call(invocation("m.wait", "0.3"), lane=Lane.METHODS))
            for _ in range(20)
        ]
        await asyncio.sleep(0.1)
        for each in client.client_list(_type="pubsub"):
            if each["sub"] == "1":
                client.client_kill_filter(_id=each["id"])
        assert len(await asyncio.gather(*calls)) == 20
        await asyncio.to_thread(
            wait_until, lambda: client.pubsub_channels(subscription.channel), what="the subscription"
        )


@pytest.mark.extended
async def test_caller_gets_an_error_during_a_redis_outage_and_works_when_it_returns(
    own_redis: Any, make_settings: Callable[..., Settings], start_worker: StartWorker
) -> None:
    settings = make_settings(broker={"url": own_redis.url, "socket_timeout_seconds": 2})
    app = create_app(settings)
    async with MethodCaller(app, settings) as caller:
        worker = start_worker("asyncio", settings=settings)
        assert (await caller.call(invocation("m.noop"), lane=Lane.METHODS)).text == "x"
        own_redis.kill()
        with pytest.raises(BrokerUnavailableError):
            await caller.call(invocation("m.noop", seconds=WAIT_SECONDS), lane=Lane.METHODS)
        own_redis.start()
        assert (await caller.call(invocation("m.noop", seconds=WAIT_SECONDS), lane=Lane.METHODS)).text == "x"
        own_redis.process.send_signal(signal.SIGSTOP)
        try:
            # Redis reads the message when it resumes.
            with pytest.raises(OutcomeUnknownError):
                await caller.call(invocation("m.noop", seconds=WAIT_SECONDS), lane=Lane.METHODS)
        finally:
            own_redis.process.send_signal(signal.SIGCONT)
        assert (await caller.call(invocation("m.noop", seconds=WAIT_SECONDS), lane=Lane.METHODS)).text == "x"
        assert worker.process.poll() is None
    app.close()


@pytest.mark.extended
async def test_redis_that_is_down_at_the_first_call_is_an_error_and_later_calls_work(
    own_redis: Any, make_settings: Callable[..., Settings], start_worker: StartWorker
) -> None:
    settings = make_settings(broker={"url": own_redis.url})
    own_redis.kill()
    app = create_app(settings)
    async with MethodCaller(app, settings) as caller:
        with pytest.raises(BrokerUnavailableError):
            await caller.call(invocation("m.noop"), lane=Lane.METHODS)
        own_redis.start()
        start_worker("asyncio", settings=settings)
        assert (await caller.call(invocation("m.noop"), lane=Lane.METHODS)).text == "x"
    app.close()


def test_caller_works_on_uvloop(app: NekroApp, settings: Settings, worker: WorkerProcess) -> None:
    async def main() -> str | None:
        async with MethodCaller(app, settings) as caller:
            return (await caller.call(invocation("m.noop"), lane=Lane.METHODS)).text

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == "x"


@pytest.mark.extended
async def test_callers_of_several_processes_share_workers(
    settings: Settings, app: NekroApp, start_worker: StartWorker
) -> None:
    """Three workers, two callers, 600 calls: each answered once, to the right caller."""
    workers = [start_worker("asyncio", concurrency=50, wait=False) for _ in range(3)]
    for worker in workers:
        await asyncio.to_thread(worker.wait_ready)
    async with MethodCaller(app, settings) as one, MethodCaller(app, settings) as other:
        calls = [(caller, invocation("m.noop")) for caller in (one, other) for _ in range(300)]
        answers = await asyncio.gather(*(caller.call(call, lane=Lane.METHODS) for caller, call in calls))
    assert [answer.call_id for answer in answers] == [call.call_id for _, call in calls]


def test_pipelined_message_equals_that_of_kombu(app: NekroApp, settings: Settings) -> None:
    message = app.amqp.create_task_message("id", "m.noop", [{"a": "ü"}], {}, reply_to="r", time_limit=3)
    with app.producer_or_acquire() as producer:
        app.amqp.send_task_message(producer, "m.noop", message, queue=app.amqp.queues["methods"])
    with redis.Redis.from_url(settings.broker.url or "") as client:
        (raw,) = client.lrange(f"{settings.broker.key_prefix}methods", 0, -1)
    theirs, ours = json.loads(raw), json.loads(encode_message(message, queue="methods"))
    for document in (theirs, ours):
        properties = document["properties"]
        assert properties.pop("delivery_tag")
        body, encoding = document.pop("body"), properties.pop("body_encoding")
        with app.connection_for_write() as connection:
            decoded = connection.default_channel.decode_body(body, encoding)
        document["arguments"] = json.loads(decoded)
    assert ours == theirs
