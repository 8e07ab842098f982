"""The peer Celery with default settings: ``asyncio.run`` in the task, with two of its pools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, Contender, Setup, WindowClient, probe
from benchmarks.harness.worker import worker_command

__all__ = ["PREFORK", "THREADS", "CeleryClient", "create_app", "run_worker"]

_CHILDREN = 2
_THREADS = 16
#: Pool of a worker process, passed in the environment, as its command line takes only a module.
_POOL_VARIABLE = "RPC_BENCH_CELERY_POOL"


def create_app(setup: Setup) -> Any:
    """Build an app with Celery's defaults: early acks, prefetch 4, JSON, Redis results."""
    from celery import Celery

    app = Celery("stock", broker=setup.redis_url, backend=setup.redis_url)

    def run_probe(number: int, text: str) -> dict[str, Any]:
        return asyncio.run(probe(number, text))

    app.task(name="probe")(run_probe)
    return app


def run_worker(setup: Setup) -> None:
    """Run one worker until a signal ends it."""
    pool, concurrency = os.environ[_POOL_VARIABLE].split(":")
    options = ["--pool", pool, "--concurrency", concurrency, "--loglevel", "WARNING"]
    create_app(setup).worker_main(["worker", *options, "--hostname", f"bench-{os.getpid()}@%h"])


class CeleryClient(WindowClient[Any]):
    """``send_task`` and ``AsyncResult.get``, which subscribes to each result."""

    def __init__(self, setup: Setup) -> None:
        self._app = create_app(setup)

    def send(self, number: int) -> Any:
        return self._app.send_task("probe", args=(number, TEXT))

    def receive(self, ticket: Any) -> object:
        return ticket.get(timeout=CALL_SECONDS)

    def close(self) -> None:
        # Stop the consumer first: an app that is closed with an open subscription reconnects for seconds.
        self._app.backend.result_consumer.stop()
        self._app.close()


def _with_pool(pool: str, concurrency: int) -> Callable[[Setup], dict[str, str]]:
    return lambda setup: {_POOL_VARIABLE: f"{pool}:{concurrency}"}


PREFORK = Contender(
    name="celery-prefork",
    about=f"stock Celery, prefork with {_CHILDREN} children per worker, asyncio.run, Redis results",
    modules=("celery", "redis"),
    worker_commands=lambda setup: [worker_command(__name__)] * setup.workers,
    open_client=CeleryClient,
    environment=_with_pool("prefork", _CHILDREN),
)

THREADS = Contender(
    name="celery-threads",
    about=f"stock Celery, {_THREADS} threads per worker, asyncio.run, Redis results",
    modules=("celery", "redis"),
    worker_commands=lambda setup: [worker_command(__name__)] * setup.workers,
    open_client=CeleryClient,
    environment=_with_pool("threads", _THREADS),
)
