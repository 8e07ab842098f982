"""Calls on the direct path and through Celery's tracer end alike, and each method runs once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import chain, group
from pool_worker import TRACED
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess, read_ledger

from broker_config.app import RESULT_SECONDS, NekroApp, create_app
from broker_config.keys import Keys
from broker_config.settings import Settings
from nekro.wire.invocation import new_id
from workers.pools.jobs import Interruptible, JobStopped, PoolJob, StopReason, TaskBody

StartWorker = Callable[..., WorkerProcess]
Send = Callable[..., Any]

#: Queue of the worker for each path, and the worker's options.
PATHS = {"fast": "methods", "tracer": "long"}
OPTIONS: dict[str, tuple[str, ...]] = {"fast": (), "tracer": (TRACED,)}

#: Bodies of ``f.run`` and options of their messages, with the expected state and stored value.
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], str, Any]] = {
    "value": ({"how": "ok", "value": {"a": ["ü", 1, None, 2.5]}}, {}, "SUCCESS", {"a": ["ü", 1, None, 2.5]}),
    "nothing": ({"how": "ok"}, {}, "SUCCESS", None),
    "waiting": ({"how": "wait", "seconds": 0.05}, {}, "SUCCESS", "done"),
    "unwritable": ({"how": "odd"}, {}, "FAILURE", "EncodeError"),
    "too deep": ({"how": "deep"}, {}, "FAILURE", "RecursionError"),
    "plugin error": ({"how": "fail", "name": "ValueError"}, {}, "FAILURE", "ValueError"),
    "argument": ({"how": "fail", "name": "ArgumentError"}, {}, "FAILURE", "ArgumentError"),
    "result": ({"how": "fail", "name": "ResultError"}, {}, "FAILURE", "ResultError"),
    "exit": ({"how": "fail", "name": "SystemExit"}, {}, "FAILURE", "MethodAbortedError"),
    "interrupt": ({"how": "fail", "name": "KeyboardInterrupt"}, {}, "FAILURE", "MethodAbortedError"),
    "memory": ({"how": "fail", "name": "MemoryError"}, {}, "FAILURE", "MethodAbortedError"),
    "cancelled": ({"how": "fail", "name": "CancelledError"}, {}, "FAILURE", "MethodAbortedError"),
    "generator": ({"how": "fail", "name": "GeneratorExit"}, {}, "FAILURE", "MethodAbortedError"),
    "no such": ({"how": "nothing of the kind"}, {}, "FAILURE", "AttributeError"),
    "soft limit": (
        {"how": "wait", "seconds": 60},
        {"soft_time_limit": 0.2, "time_limit": 30},
        "FAILURE",
        "SoftTimeLimitExceeded",
    ),
    "soft limit obeyed": (
        {"how": "clean_up"},
        {"soft_time_limit": 0.2, "time_limit": 30},
        "SUCCESS",
        "cleaned up",
    ),
    "hard limit": ({"how": "stubborn"}, {"time_limit": 0.3}, "FAILURE", "TimeLimitExceeded"),
    "revoked": ({"how": "wait", "seconds": 60}, {}, "REVOKED", "TaskRevokedError"),
}


@pytest.fixture
def workers(start_worker: StartWorker, settings: Settings) -> dict[str, WorkerProcess]:
    """One worker per path, each on its own queue."""
    found = {
        path: start_worker(
            "asyncio",
            *OPTIONS[path],
            lane=lane,
            concurrency=50,
            wait=False,
        )
        for path, lane in PATHS.items()
    }
    for worker in found.values():
        worker.wait_ready()
    return found


def starts(settings: Settings, task_id: str) -> list[str]:
    """Paths of a call's executions, one entry per start."""
    return [entry[2] for entry in read_ledger(settings) if entry[:2] == [task_id, "started"]]


def nothing_is_held(client: Any, settings: Settings) -> bool:
    """Whether queues and held deliveries are empty."""
    prefix = settings.broker.key_prefix
    names = [f"{before}{lane}" for lane in PATHS.values() for before in ("", "unacked.")]
    return not client.exists(*(f"{prefix}{name}" for name in names))


def record(client: Any, app: NekroApp, result: Any) -> dict[str, Any]:
    """The stored result of a call."""
    found: dict[str, Any] = json.loads(client.get(app.backend.get_key_for_task(result.id)))
    return found


@pytest.mark.extended
def test_every_outcome_is_the_same_on_both_paths_and_every_method_runs_once(
    workers: dict[str, WorkerProcess],
    send: Send,
    client: Any,
    app: NekroApp,
    settings: Settings,
    tmp_path: Path,
) -> None:
    path_of_end = str(tmp_path / "end")
    results = {
        (path, name): send("f.run", body | {"path": path_of_end}, queue=queue, **options)
        for path, queue in PATHS.items()
        for name, (body, options, _, _) in ENDS.items()
    }
    for path in PATHS:
        revoked = results[path, "revoked"]
        wait_until(lambda task_id=revoked.id: starts(settings, task_id), what="the call to start")
        # The other worker would mark it as revoked as well, and may be first.
        app.control.revoke(revoked.id, terminate=True, destination=[f"{workers[path].log.stem}@test"])
    duplicates = {
        path: send("f.run", {"how": "fail", "name": "DuplicateDelivery"}, queue=queue)
        for path, queue in PATHS.items()
    }
    stored: dict[tuple[str, str], dict[str, Any]] = {}
    for key, result in results.items():
        result.get(WAIT_SECONDS, propagate=False)
        stored[key] = record(client, app, result)
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")
    Path(path_of_end).touch()
    for name, (_, _, state, outcome) in ENDS.items():
        fast, tracer = stored["fast", name], stored["tracer", name]
        assert fast["status"] == tracer["status"] == state, name
        assert fast.keys() == tracer.keys(), name
        if state == "SUCCESS":
            assert fast["result"] == tracer["result"], name
            assert outcome is None or fast["result"] == outcome, name
        else:
            assert fast["result"]["exc_type"] == tracer["result"]["exc_type"] == outcome, name
            assert fast["result"] == tracer["result"], name
        for path in PATHS:
            assert starts(settings, results[path, name].id) == [path], name
    for path, duplicate in duplicates.items():
        assert starts(settings, duplicate.id) == [path]
        assert not client.exists(app.backend.get_key_for_task(duplicate.id)), "it leaves no trace"
    for path, worker in workers.items():
        assert send("f.run", {"how": "ok", "value": path}, queue=PATHS[path]).get(WAIT_SECONDS) == path
        assert worker.process.poll() is None


@pytest.mark.extended
def test_a_success_leaves_the_same_keys_in_redis_as_celery(
    workers: dict[str, WorkerProcess], send: Send, client: Any, app: NekroApp, settings: Settings
) -> None:
    records, traced = {}, {}
    for path, queue in PATHS.items():
        caller = new_id()
        with client.pubsub(ignore_subscribe_messages=True) as subscriber:
            channel = Keys(prefix=settings.broker.key_prefix).reply(caller)
            subscriber.psubscribe(f"{settings.broker.key_prefix}celery-task-meta-*", channel)
            for _ in range(2):
                assert subscriber.get_message(timeout=WAIT_SECONDS) is None  # it is subscribed
            result = send("f.run", {"how": "ok", "value": [1, {"b": "x"}]}, queue=queue, reply_to=caller)
            assert result.get(WAIT_SECONDS) == [1, {"b": "x"}]
            published, announced = (
                wait_until(
                    lambda subscriber=subscriber: subscriber.get_message(timeout=1), what="the publication"
                )
                for _ in range(2)
            )
        key = app.backend.get_key_for_task(result.id)
        stored = client.get(key)
        assert stored == published["data"] == announced["data"]
        assert announced["channel"].decode() == channel
        assert 0 < client.ttl(key) <= RESULT_SECONDS
        records[path] = json.loads(stored)
        assert records[path].pop("task_id") == result.id
        if path == "tracer":  # which is counted after the result is stored
            workers[path].wait_log(f"[{result.id}] succeeded")
        traced[path] = f"[{result.id}] succeeded" in workers[path].log.read_text()
    for found in records.values():
        assert found.pop("date_done").endswith("+00:00")
    assert records["fast"] == records["tracer"]
    assert list(records["fast"]) == list(records["tracer"])
    assert traced == {"fast": False, "tracer": True}


@pytest.mark.extended
@pytest.mark.parametrize("path", PATHS)
def test_each_call_is_counted_once(
    path: str, start_worker: StartWorker, send: Send, client: Any, settings: Settings
) -> None:
    start_worker("asyncio", *OPTIONS[path])
    bodies: list[dict[str, Any]] = [
        *({"how": "ok", "value": number} for number in range(5)),
        *({"how": "fail", "name": name} for name in ("ValueError", "KeyboardInterrupt", "ResultError")),
        *({"how": "fail", "name": "DuplicateDelivery"} for _ in range(2)),
        {"how": "odd"},
        {"how": "deep"},
    ]
    for body in bodies:
        send("f.run", body)
    limited = send("f.run", {"how": "wait", "seconds": 60}, soft_time_limit=0.2)
    limited.get(WAIT_SECONDS, propagate=False)
    wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgements")
    figures = send("t.figures").get(WAIT_SECONDS)
    assert figures["in_flight"] == 1, "the task that returns them"
    # One with an unencodable value has succeeded when Celery sees it, one nested too deep has failed.
    assert figures["f.run"] == {
        "ok": 6,
        "method_failed": 3,
        "duplicate": 2,
        "method_aborted": 1,
        "result": 1,
    }
    assert len(read_ledger(settings)) == len(bodies) + 1, "each method ran once"


def test_unsupported_message_options_are_refused_by_the_sender(send: Send, app: NekroApp) -> None:
    body = {"how": "ok", "value": 5}
    call = app.signature("f.run", args=(body,), queue="methods")
    note = app.signature("t.note", queue="methods")
    options: list[dict[str, Any]] = [
        {"link": note},
        {"link_error": note},
        {"eta": "2999-01-01T00:00:00+00:00"},
        {"countdown": 1},
        {"expires": 60},
        {"group_id": new_id()},
        {"retries": 1},
        {"ignore_result": True},
        {"stamped_headers": ["a"], "a": "b"},
    ]
    for option in options:
        with pytest.raises(ValueError, match="only positional arguments"):
            send("f.run", body, **option)
    with pytest.raises(ValueError, match="only positional arguments"):
        app.send_task("f.run", kwargs={"body": body}, queue="methods")
    with pytest.raises(ValueError, match="only positional arguments"):
        chain(call, note.clone(args=("chained",)), app=app).apply_async()
    with pytest.raises(ValueError, match="only positional arguments"):
        group([call, call], app=app).apply_async()


def test_foreign_signal_receivers_select_the_tracer(
    start_worker: StartWorker, send: Send, app: NekroApp, settings: Settings
) -> None:
    start_worker("asyncio")
    body = {"how": "ok", "value": 5}

    def path_of(result: Any) -> str:
        assert result.get(WAIT_SECONDS) == 5
        (path,) = starts(settings, result.id)
        return path

    for name in ("task_prerun", "task_postrun", "task_success"):
        send("t.listen", name).get(WAIT_SECONDS)
        assert path_of(send("f.run", body)) == "tracer", name
        send("t.unlisten", name).get(WAIT_SECONDS)
        assert path_of(send("f.run", body)) == "fast", name


@pytest.mark.parametrize("loss", ["memory", "server"])
def test_result_that_redis_refused_is_stored_by_the_tracer_and_the_method_runs_once(
    loss: str,
    own_redis: Any,
    make_settings: Callable[..., Settings],
    start_worker: StartWorker,
    tmp_path: Path,
) -> None:
    own_redis.append_only = True
    own_redis.stop()
    own_redis.start()
    settings = make_settings(broker={"url": own_redis.url})
    caller = create_app(settings)
    # With a concurrency of one it takes no other message, so only this call's commands are counted.
    worker = start_worker("asyncio", settings=settings, concurrency=1)
    end = tmp_path / "end"
    result = caller.send_task("f.run", [{"how": "until", "path": str(end)}], queue="methods")
    wait_until(lambda: starts(settings, result.id) == ["fast"], what="the call to start")
    with redis.Redis.from_url(own_redis.url) as client:
        if loss == "memory":
            before = failed_scripts(client)
            client.config_set("maxmemory", 1)
            end.touch()
            wait_until(lambda: failed_scripts(client) > before, what="the refusal")
            client.config_set("maxmemory", 0)
        else:
            own_redis.kill()
            end.touch()
            # Of the tracer: the fast path has failed before. A server that is back earlier takes its result.
            worker.wait_log("Failed operation _store_result")
            own_redis.start()
        wait_until(lambda: client.exists(caller.backend.get_key_for_task(result.id)), what="the result")
        wait_until(lambda: nothing_is_held(client, settings), what="the acknowledgement")
    assert result.get(WAIT_SECONDS) == "done"
    assert starts(settings, result.id) == ["fast"]
    worker.wait_log(f"[{result.id}] succeeded")
    caller.backend.result_consumer.stop()
    caller.close()


def failed_scripts(client: Any) -> int:
    """Number of scripts that Redis rejected."""
    figures = client.info("commandstats").get("cmdstat_eval", {})
    return int(figures.get("failed_calls", 0))


def test_sigterm_waits_for_a_call(
    start_worker: StartWorker, send: Send, client: Any, settings: Settings, tmp_path: Path
) -> None:
    worker = start_worker("asyncio")
    end = tmp_path / "end"
    result = send("f.run", {"how": "until", "path": str(end)})
    wait_until(lambda: starts(settings, result.id) == ["fast"], what="the call to start")
    worker.send(signal.SIGTERM)
    worker.wait_log("Warm shutdown")
    end.touch()
    assert worker.wait() == 0
    assert result.get(WAIT_SECONDS) == "done"
    assert nothing_is_held(client, settings)
    assert "Unrecoverable" not in worker.log.read_text()


@pytest.mark.extended
def test_sigquit_gives_a_running_call_back(
    start_worker: StartWorker, send: Send, settings: Settings, tmp_path: Path
) -> None:
    worker = start_worker("asyncio")
    end = tmp_path / "end"
    result = send("f.run", {"how": "until", "path": str(end)})
    wait_until(lambda: starts(settings, result.id) == ["fast"], what="the call to start")
    worker.send(signal.SIGQUIT)
    worker.wait()
    end.touch()
    start_worker("asyncio")
    assert result.get(WAIT_SECONDS) == "done"
    assert starts(settings, result.id) == ["fast", "fast"]


def test_an_event_receiver_gets_the_events_of_a_call_and_its_result(
    start_worker: StartWorker, send: Send, app: NekroApp
) -> None:
    start_worker("asyncio")
    seen: list[dict[str, Any]] = []

    def drain(connection: Any) -> bool:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
        return bool(seen)

    with app.connection_for_read() as idle:
        receiver = app.events.Receiver(idle, handlers={"*": seen.append})
        with receiver.consumer_context() as (connection, _, _):
            wait_until(lambda: drain(connection), what="a heartbeat, which proves the subscription")
            # The worker checks once a second for receivers.
            wait_until(
                lambda: (
                    send("f.run", {"how": "ok", "value": "x" * 200})
                    and drain(connection)
                    and any(event["type"] == "task-succeeded" for event in seen)
                ),
                what="a worker that knows of its watcher",
            )
            result = send("f.run", {"how": "ok", "value": "y" * 200})
            own = wait_until(
                lambda: (
                    drain(connection)
                    and len(own := [event for event in seen if event.get("uuid") == result.id]) >= 3
                    and own
                ),
                what="the events",
            )
    assert [event["type"] for event in own] == ["task-received", "task-started", "task-succeeded"]
    assert own[2]["result"].startswith("'yyyy")
    assert len(own[2]["result"]) < 100


def make_job() -> PoolJob:
    """A job without a waiting caller."""
    return PoolJob(
        target=lambda *args: (False, None, 0.0),
        args=("t.name", "id"),
        kwargs={},
        callback=lambda _: None,
        accept_callback=None,
        error_callback=None,
        timeout_callback=None,
        soft_limit_seconds=None,
        hard_limit_seconds=None,
    )


async def test_a_stop_between_the_start_of_a_body_and_its_first_wait_is_applied() -> None:
    """The consumer stops jobs from a thread of its own, at any moment."""
    job = make_job()

    async def run() -> None:
        assert job.begin()
        with TaskBody():
            job.stop(StopReason.TERMINATED)
            with Interruptible():
                await asyncio.Event().wait()

    running = asyncio.create_task(run())
    ended, _ = await asyncio.wait({running}, timeout=WAIT_SECONDS)
    running.cancel()
    assert ended, "it waits for ever"
    assert isinstance(running.exception(), JobStopped)


async def test_a_stop_cancels_only_the_awaited_body() -> None:
    """The result is stored in the same task afterwards."""
    job = make_job()

    async def run() -> str:
        assert job.begin()
        with Interruptible() as guard:
            asyncio.get_running_loop().call_soon(job.stop, StopReason.SOFT_LIMIT)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        assert guard.was_interrupted
        with Interruptible():
            job.stop(StopReason.SOFT_LIMIT)  # arrives in the loop after the body has ended
        job.stop(StopReason.SOFT_LIMIT)
        await asyncio.sleep(0.01)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0, "what is stored next would take this for the end of the loop"
        return "stored"

    async with asyncio.timeout(WAIT_SECONDS):
        assert await asyncio.create_task(run()) == "stored"
