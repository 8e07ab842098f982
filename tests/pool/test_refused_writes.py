"""A Redis that answers but refuses writes: workers that connect to it wait, and serve afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis_process import RedisServer
from waiting import wait_until
from worker_process import WorkerProcess

from broker_config.settings import Settings

StartWorker = Callable[..., WorkerProcess]
Send = Callable[..., Any]

#: Settings of Redis that are 0 by default; with 1 it refuses writes.
REFUSALS = pytest.mark.parametrize("name", ["min-replicas-to-write", "maxmemory"])
#: What Celery logs before each attempt to connect but the first one.
AGAIN = "Trying to re"


@pytest.fixture
def settings(make_settings: Callable[..., Settings], own_redis: RedisServer) -> Settings:
    return make_settings(broker={"url": own_redis.url})


def serves(worker: WorkerProcess, send: Send) -> None:
    """Wait until the worker runs a task."""
    task_id = send("t.wait", 0).id
    done = [task_id, "finished"]
    wait_until(
        lambda: done in worker.ledger() or worker.process.poll() is not None,
        what=lambda: f"the task to end:\n{worker.log.read_text()}",
    )
    assert worker.process.poll() is None, worker.log.read_text()


@REFUSALS
def test_a_worker_that_connects_again_while_writes_are_refused_goes_on(
    name: str, start_worker: StartWorker, send: Send, client: redis.Redis
) -> None:
    worker = start_worker()
    serves(worker, send)
    client.config_set(name, 1)
    client.client_kill_filter(_type="normal", skipme=True)
    wait_until(
        lambda: worker.log.read_text().count(AGAIN) > 2 or worker.process.poll() is not None,
        what=lambda: f"attempts to connect that are refused:\n{worker.log.read_text()}",
    )
    client.config_set(name, 0)
    serves(worker, send)


@REFUSALS
def test_a_worker_that_starts_while_writes_are_refused_waits(
    name: str, start_worker: StartWorker, send: Send, client: redis.Redis
) -> None:
    client.config_set(name, 1)
    worker = start_worker(wait=False)
    worker.wait_log(AGAIN)
    client.config_set(name, 0)
    serves(worker, send)
