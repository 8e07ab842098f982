"""The peer huey: a consumer with threads on Redis, results announced on lists."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, Contender, Setup, WindowClient, probe
from benchmarks.harness.worker import worker_command

__all__ = ["CONTENDER", "HueyClient", "create_huey", "run_worker"]

_THREADS = 8


def create_huey(setup: Setup) -> tuple[Any, Any]:
    """Build the queue and its task; with ``notify_result`` the client need not poll."""
    from huey import RedisHuey

    queue = RedisHuey("bench", url=setup.redis_url, notify_result=True)

    def run_probe(number: int, text: str) -> dict[str, Any]:
        return asyncio.run(probe(number, text))

    return queue, queue.task(name="probe")(run_probe)


def run_worker(setup: Setup) -> None:
    """Run one consumer until a signal ends it."""
    import logging

    logging.getLogger("huey").setLevel(logging.WARNING)
    queue, _ = create_huey(setup)
    queue.create_consumer(workers=_THREADS, worker_type="thread", periodic=False).run()


class HueyClient(WindowClient[Any]):
    """A call of the task and a blocking ``get``."""

    def __init__(self, setup: Setup) -> None:
        self._queue, self._task = create_huey(setup)

    def send(self, number: int) -> Any:
        return self._task(number, TEXT)

    def receive(self, ticket: Any) -> object:
        return ticket.get(blocking=True, timeout=CALL_SECONDS)

    def close(self) -> None:
        self._queue.storage.conn.close()


CONTENDER = Contender(
    name="huey",
    about=f"huey, RedisHuey with notify_result, {_THREADS} threads per consumer, asyncio.run",
    modules=("huey", "redis"),
    worker_commands=lambda setup: [worker_command(__name__)] * setup.workers,
    open_client=HueyClient,
)
