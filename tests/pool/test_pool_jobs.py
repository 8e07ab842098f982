"""Both pools, on real workers: outcomes, limits, revocation, shutdown."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from waiting import WAIT_SECONDS, wait_until
from worker_process import WorkerProcess

from broker_config.app import NekroApp
from workers.pools.jobs import PoolJob

StartWorker = Callable[..., WorkerProcess]
Send = Callable[..., Any]

BOTH = pytest.mark.parametrize("pool", ["asyncio", "threads"])
THREADS_SLOWLY = pytest.mark.parametrize("pool", ["asyncio", pytest.param("threads", marks=pytest.mark.slow)])


@pytest.mark.extended
@BOTH
def test_aborting_tasks_occupy_no_slot(pool: str, start_worker: StartWorker, send: Send) -> None:
    start_worker(pool, concurrency=2)
    for how in ("plain", "coroutine", "guarded"):
        for name in ("CancelledError", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "MemoryError"):
            result = send("t.abort", name, how)
            with pytest.raises(Exception) as caught:
                result.get(WAIT_SECONDS)
            assert name in repr(caught.value), (how, name)
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"


@THREADS_SLOWLY
def test_current_task_is_correct_in_concurrent_tasks(
    pool: str, start_worker: StartWorker, send: Send
) -> None:
    start_worker(pool, concurrency=4)
    results = [send("t.who") for _ in range(20)]
    for result in results:
        assert result.get(WAIT_SECONDS) == [result.id, result.id]


@BOTH
def test_soft_limit_cancels_a_task_which_may_clean_up(
    pool: str, start_worker: StartWorker, send: Send
) -> None:
    start_worker(pool)
    assert send("t.soft", soft_time_limit=0.2, time_limit=30).get(WAIT_SECONDS) == "cleaned up"


@BOTH
def test_hard_limit_fails_a_task_and_frees_its_slot(pool: str, start_worker: StartWorker, send: Send) -> None:
    worker = start_worker(pool, concurrency=1)
    with pytest.raises(TimeLimitExceeded):
        send("t.stubborn", 6, time_limit=0.3).get(WAIT_SECONDS)
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"
    assert worker.process.poll() is None


@pytest.mark.extended
def test_hard_limit_replaces_a_thread_that_blocks(start_worker: StartWorker, send: Send) -> None:
    start_worker("threads", concurrency=1)
    with pytest.raises(TimeLimitExceeded):
        send("t.block", 8, time_limit=0.3).get(WAIT_SECONDS)
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"


def test_what_a_task_leaves_at_its_hard_limit_ends_without_another_task(
    start_worker: StartWorker, send: Send
) -> None:
    worker = start_worker("threads", concurrency=1)
    with pytest.raises(TimeLimitExceeded):
        send("t.abandon", time_limit=0.3).get(WAIT_SECONDS)
    wait_until(lambda: ["?", "abandoned"] in worker.ledger(), what="the end of what the task has left")
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"


@BOTH
def test_revoked_task_is_cancelled(pool: str, start_worker: StartWorker, send: Send, app: NekroApp) -> None:
    worker = start_worker(pool, concurrency=1)
    result = send("t.wait", 60)
    wait_until(lambda: [result.id, "started"] in worker.ledger(), what="the task to start")
    app.control.revoke(result.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        result.get(WAIT_SECONDS)
    assert result.state == "REVOKED"
    wait_until(lambda: ["?", "cancelled", "terminated"] in worker.ledger(), what="the cancellation")
    assert send("t.wait", 0).get(WAIT_SECONDS) == "done"


@BOTH
def test_sigterm_waits_for_running_tasks(pool: str, start_worker: StartWorker, send: Send) -> None:
    worker = start_worker(pool)
    result = send("t.wait", 1.5)
    wait_until(lambda: [result.id, "started"] in worker.ledger(), what="the task to start")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert result.get(WAIT_SECONDS) == "done"
    assert "Unrecoverable" not in worker.log.read_text()


@pytest.mark.extended
@BOTH
def test_sigquit_gives_running_tasks_back_to_the_queue(
    pool: str, start_worker: StartWorker, send: Send
) -> None:
    worker = start_worker(pool)
    result = send("t.wait", 30)
    wait_until(lambda: [result.id, "started"] in worker.ledger(), what="the task to start")
    worker.send(signal.SIGQUIT)
    worker.wait()
    assert "NotImplementedError" not in worker.log.read_text()
    start_worker(pool)
    wait_until(lambda: worker.ledger().count([result.id, "started"]) == 2, what="the second delivery")


@pytest.mark.extended
@THREADS_SLOWLY
def test_drain_time_bounds_a_warm_shutdown(
    pool: str, start_worker: StartWorker, send: Send, make_settings: Callable[..., Any], settings: Any
) -> None:
    short = settings.model_copy(
        update={"workers": settings.workers.model_copy(update={"drain_seconds": 0.5})}
    )
    worker = start_worker(pool, settings=short)
    result = send("t.wait", 30)
    wait_until(lambda: [result.id, "started"] in worker.ledger(), what="the task to start")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    start_worker(pool)
    wait_until(lambda: worker.ledger().count([result.id, "started"]) == 2, what="the second delivery")


@BOTH
def test_loops_are_cleaned_up_on_shutdown(pool: str, start_worker: StartWorker, send: Send) -> None:
    worker = start_worker(pool, concurrency=1)
    first, second = send("t.loop").get(WAIT_SECONDS), send("t.loop").get(WAIT_SECONDS)
    assert first == second, "a loop lives as long as its thread"
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert ["?", "cleaned"] in worker.ledger()


@THREADS_SLOWLY
def test_pool_describes_itself_and_its_jobs(
    pool: str, start_worker: StartWorker, send: Send, app: NekroApp
) -> None:
    worker = start_worker(pool, concurrency=3)
    result = send("t.wait", 60)
    wait_until(lambda: [result.id, "started"] in worker.ledger(), what="the task to start")
    inspect = app.control.inspect(timeout=WAIT_SECONDS, limit=1)
    (stats,) = inspect.stats().values()
    assert stats["pool"]["max-concurrency"] == 3
    assert stats["pool"]["jobs"] == 1
    ((active,),) = inspect.active().values()
    assert active["id"] == result.id
    assert active["args"] == "(hidden)"
    app.control.pool_grow(2, reply=True)
    (stats,) = inspect.stats().values()
    assert stats["pool"]["max-concurrency"] == 5


@pytest.mark.extended
def test_a_thousand_waiting_tasks_run_concurrently(start_worker: StartWorker, send: Send) -> None:
    worker = start_worker("asyncio", concurrency=1000)
    results = [send("t.wait", 1.5) for _ in range(1000)]
    wait_until(
        lambda: len([entry for entry in worker.ledger() if entry[1] == "started"]) == 1000,
        what="all to start",
    )
    for result in results:
        assert result.get(WAIT_SECONDS) == "done"


def test_no_more_jobs_run_than_the_concurrency_allows(start_worker: StartWorker, send: Send) -> None:
    worker = start_worker("asyncio", "--prefetch-multiplier", "4", concurrency=2)
    results = [send("t.wait", 0.2) for _ in range(8)]
    for result in results:
        result.get(WAIT_SECONDS)
    running = most = 0
    for _, event in worker.ledger():
        running += 1 if event == "started" else -1
        most = max(most, running)
    assert most == 2


@pytest.mark.extended
@BOTH
def test_events_cover_every_task_without_its_arguments(
    pool: str, start_worker: StartWorker, send: Send, app: NekroApp
) -> None:
    start_worker(pool, concurrency=4)
    seen: dict[str, list[str]] = {}
    raw: list[str] = []

    def on_event(event: dict[str, Any]) -> None:
        raw.append(repr(event))
        if event["type"].startswith("task-"):
            seen.setdefault(event["uuid"], []).append(event["type"])

    def drain(connection: Any) -> bool:
        with contextlib.suppress(TimeoutError):
            connection.drain_events(timeout=0.2)
        return bool(raw)

    with app.connection_for_read() as idle:
        receiver = app.events.Receiver(idle, handlers={"*": on_event})
        with receiver.consumer_context() as (connection, _, _):
            wait_until(lambda: drain(connection), what="a heartbeat, which proves the subscription")
            results = [send("t.secret", "hunter22") for _ in range(60)]
            wait_until(
                lambda: (
                    drain(connection)
                    and all("task-succeeded" in seen.get(result.id, []) for result in results)
                ),
                what="the events",
            )
    expected = ["task-received", "task-started", "task-succeeded"]
    assert all(seen[result.id] == expected for result in results)
    assert "hunter22" not in "".join(raw)


def test_a_dropped_job_does_not_run_and_a_started_one_cannot_be_dropped() -> None:
    """After a lost connection, jobs that have not started are redelivered and must not start here as well."""
    ran: list[str] = []

    def job(name: str) -> PoolJob:
        return PoolJob(
            target=lambda *args: ran.append(args[1]) or (False, None, 0.0),
            args=("t.name", name),
            kwargs={},
            callback=lambda _: None,
            accept_callback=None,
            error_callback=None,
            timeout_callback=None,
            soft_limit_seconds=None,
            hard_limit_seconds=None,
        )

    waiting, running = job("waiting"), job("running")
    assert waiting.drop()
    waiting.run()
    running.run()
    assert (ran, running.drop(), running.has_begun, running.task_id) == (["running"], False, True, "running")
