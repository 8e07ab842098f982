"""Stored and announced results, and errors as callers receive them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import states
from celery.app.task import Context
from waiting import WAIT_SECONDS, wait_until

from broker_config.app import RESULT_SECONDS, NekroApp, create_app
from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.base import loop_thread
from nekro.base.greenlet_bridge import (
    at_loop_close,
    await_here,
    can_await,
    close_loop_resources,
    limit_loop_close,
    seconds_to_close,
    spawn,
)
from nekro.broker.celery.result_backend import MAX_ANNOUNCED_BYTES
from nekro.broker.failures import failure_from_record
from nekro.wire.invocation import new_id
from nekro_agent import errors
from nekro_agent.errors import (
    CallCancelledError,
    CallTimeoutError,
    MethodFailedError,
    MethodNotFoundError,
    NekroError,
    OutcomeUnknownError,
)


@pytest.fixture
def announced(settings: Settings, client: redis.Redis) -> Iterator[Callable[[], dict[str, Any]]]:
    """Returns the next announcement to any caller, with ``channel``."""
    with client.pubsub(ignore_subscribe_messages=True) as subscriber:
        subscriber.psubscribe(f"{settings.broker.key_prefix}reply:*")
        assert subscriber.get_message(timeout=WAIT_SECONDS) is None  # it is subscribed

        def following() -> dict[str, Any]:
            found = wait_until(lambda: subscriber.get_message(timeout=1), what="an announcement")
            return {"channel": found["channel"].decode(), **json.loads(found["data"])}

        yield following


def test_result_is_stored_and_announced_to_its_caller(
    app: NekroApp, settings: Settings, client: redis.Redis, announced: Callable[[], dict[str, Any]]
) -> None:
    task_id, caller = new_id(), new_id()
    app.backend.store_result(task_id, {"a": 1}, states.SUCCESS, request=Context(reply_to=caller))
    stored = app.backend.get_key_for_task(task_id)
    channel = Keys(prefix=settings.broker.key_prefix).reply(caller)
    assert announced() == {"channel": channel, **json.loads(client.get(stored))}
    assert 0 < client.ttl(stored) <= RESULT_SECONDS
    assert app.AsyncResult(task_id).result == {"a": 1}


def test_of_a_long_result_only_the_id_is_announced(
    app: NekroApp, client: redis.Redis, announced: Callable[[], dict[str, Any]]
) -> None:
    task_id, text = new_id(), "x" * MAX_ANNOUNCED_BYTES
    app.backend.store_result(task_id, text, states.SUCCESS, request=Context(reply_to=new_id()))
    assert announced().keys() == {"channel", "task_id"}
    assert app.AsyncResult(task_id).result == text


@pytest.mark.parametrize("reply_to", [None, "", "x", "../etc", "a" * 33, "0123456789ABCDEF" * 2, 5])
def test_only_a_caller_id_becomes_a_channel(
    app: NekroApp, announced: Callable[[], dict[str, Any]], reply_to: Any
) -> None:
    app.backend.store_result(new_id(), 1, states.SUCCESS, request=Context(reply_to=reply_to))
    app.backend.store_result(new_id(), 2, states.SUCCESS, request=Context(reply_to=new_id()))
    assert announced()["result"] == 2


def test_only_a_final_state_is_announced(app: NekroApp, announced: Callable[[], dict[str, Any]]) -> None:
    app.backend.store_result(new_id(), None, states.STARTED, request=Context(reply_to=new_id()))
    app.backend.store_result(new_id(), 2, states.SUCCESS, request=Context(reply_to=new_id()))
    assert announced()["result"] == 2


def test_a_stored_success_is_not_overwritten(app: NekroApp) -> None:
    task_id = new_id()
    app.backend.store_result(task_id, "done", states.SUCCESS)
    app.backend.mark_as_failure(task_id, ValueError("late"))
    app.backend.mark_as_revoked(task_id, "terminated")
    assert app.AsyncResult(task_id).state == states.SUCCESS


async def test_results_are_stored_without_blocking_the_loop(app: NekroApp) -> None:
    ids = [new_id() for _ in range(300)]

    def store(task_id: str) -> None:
        assert can_await()
        app.backend.store_result(task_id, task_id, states.SUCCESS)

    await asyncio.gather(*(spawn(store, task_id) for task_id in ids))
    await close_loop_resources()
    for task_id in ids:
        assert app.AsyncResult(task_id).result == task_id


async def test_storing_is_retried_when_redis_returns(
    own_redis: Any, make_settings: Callable[..., Settings]
) -> None:
    app = create_app(make_settings(broker={"url": own_redis.url}))
    own_redis.kill()
    storing = asyncio.create_task(spawn(app.backend.store_result, "id", 1, states.SUCCESS))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(own_redis.start)
    await storing
    await close_loop_resources()
    assert app.AsyncResult("id").result == 1
    app.close()


async def test_failing_cleanup_does_not_stop_the_others() -> None:
    done = []

    async def good() -> None:
        done.append("good")

    async def bad() -> None:
        raise ValueError

    at_loop_close(good)
    at_loop_close(bad)
    await close_loop_resources()
    await close_loop_resources()
    assert done == ["good"]


async def test_a_cleanup_that_never_ends_does_not_take_the_time_of_others() -> None:
    done, over = [], asyncio.Event()

    async def close_database() -> None:
        await asyncio.sleep(0.2)  # longer than one hanging cleanup may take
        done.append("database")

    async def hang() -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    at_loop_close(close_database)
    at_loop_close(hang, seconds=0.1)
    await close_loop_resources()
    assert done == ["database"]
    over.set()


async def test_cleanups_share_the_time_limit_of_their_loop_and_each_gets_a_part() -> None:
    done = []

    async def close_database() -> None:
        done.append("database")

    async def hang() -> None:
        await asyncio.Event().wait()

    at_loop_close(close_database)
    for _ in range(8):
        at_loop_close(hang, seconds=3600)
    limit_loop_close(0.2)
    longest = seconds_to_close(asyncio.get_running_loop())
    assert longest < 60
    async with asyncio.timeout(WAIT_SECONDS):
        await close_loop_resources()
    assert done == ["database"]


def test_stopping_waits_for_the_cleanups_of_a_thread_with_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_thread, "CANCEL_SECONDS", 0.2)
    done = []

    async def close_slowly() -> None:
        await asyncio.sleep(1.5)  # longer than a thread may take to stop its loop
        done.append("closed")

    async def prepare() -> None:
        at_loop_close(close_slowly, seconds=30)

    thread = loop_thread.LoopThread("test-cleanups")
    thread.start()
    asyncio.run_coroutine_threadsafe(prepare(), thread.loop).result()
    thread.stop()
    assert done == ["closed"]


async def test_synchronous_code_waits_for_a_coroutine() -> None:
    def body() -> str:
        return await_here(asyncio.sleep(0, "value"))

    assert not can_await()
    assert await spawn(body) == "value"


def failure(
    kind: str, *arguments: Any, module: str = "some.plugin", status: str = states.FAILURE
) -> NekroError:
    """The error that a caller gets for a stored exception."""
    result = {"exc_type": kind, "exc_module": module, "exc_message": list(arguments)}
    return failure_from_record({"status": status, "result": result})


@pytest.mark.parametrize(
    "name",
    [name for name in errors.__all__ if name not in ("MethodFailedError",)],
)
def test_error_of_the_errors_tree_arrives_as_itself_or_as_text(name: str) -> None:
    error = failure(name, "what happened", module="nekro_agent.errors")
    assert type(error).__name__ == name or isinstance(error, MethodFailedError)
    assert "what happened" in str(error)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (failure("KeyError", "x"), MethodFailedError, "KeyError: x"),
        (failure("Odd", 1, [2]), MethodFailedError, "Odd: 1, [2]"),
        (failure("Empty"), MethodFailedError, "Empty"),
        (failure("system", "rm", module="os"), MethodFailedError, "system: rm"),
        (failure("MethodNotFoundError", "x", module="evil"), MethodFailedError, "MethodNotFoundError: x"),
        (failure("NotRegistered", "a.b.c", module="celery.exceptions"), MethodNotFoundError, "a.b.c"),
        (failure("TimeLimitExceeded", 3, module="billiard.exceptions"), CallTimeoutError, "time limit"),
        (failure("WorkerLostError", "x", module="billiard.exceptions"), OutcomeUnknownError, "unknown"),
        (failure("TaskRevokedError", "terminated", status=states.REVOKED), CallCancelledError, "cancelled"),
        (
            failure("UnpicklableExceptionWrapper", "a", "Odd", ["x"], "Odd(x)"),
            MethodFailedError,
            "UnpicklableExceptionWrapper",
        ),
        (failure("UnpickleableExceptionWrapper", "a", "Odd", ["x"], "Odd(x)"), MethodFailedError, "Odd: x"),
        (
            failure("MethodFailedError", "KeyError: 'x'", module="nekro_agent.errors"),
            MethodFailedError,
            "KeyError: 'x'",
        ),
        (failure_from_record({"status": states.FAILURE}), MethodFailedError, "Exception"),
        (failure_from_record({"status": states.FAILURE, "result": "text"}), MethodFailedError, "Exception"),
    ],
)
def test_stored_failure_becomes_an_error(error: NekroError, kind: type, text: str) -> None:
    assert type(error) is kind
    assert text in str(error)


def test_overlong_message_is_shortened() -> None:
    assert len(str(failure("Long", "x" * 100_000))) < 10_000
