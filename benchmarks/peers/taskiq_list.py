"""The peer taskiq: ``ListQueueBroker`` of taskiq-redis (no acknowledgement of messages), Redis results."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, AsyncClient, Contender, Setup, probe

__all__ = ["CONTENDER", "TaskiqClient", "create_broker"]

#: taskiq's clients poll for a result, by default every 200 ms; these intervals gave it its best figures.
_POLL_ALONE_SECONDS = 0.0
_POLL_FLOOD_SECONDS = 0.005


def create_broker() -> Any:
    """Build the broker; the worker's command line calls this without arguments."""
    from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend

    setup = Setup.from_environment()
    results: Any = RedisAsyncResultBackend(setup.redis_url, result_ex_time=3600)
    broker = ListQueueBroker(setup.redis_url).with_result_backend(results)
    broker.task(task_name="probe")(probe)
    return broker


def _worker_commands(setup: Setup) -> list[list[str]]:
    options = ["--workers", str(setup.workers), "--log-level", "WARNING"]
    return [[sys.executable, "-m", "taskiq", "worker", f"{__name__}:create_broker", *options]]


class TaskiqClient(AsyncClient):
    """``kiq`` and ``wait_result``."""

    def __init__(self, setup: Setup) -> None:
        self._broker = create_broker()
        self._task = self._broker.find_task("probe")
        self._poll_seconds = _POLL_ALONE_SECONDS
        super().__init__()

    async def open(self) -> None:
        await self._broker.startup()

    async def shut(self) -> None:
        await self._broker.shutdown()

    async def call(self, number: int) -> object:
        task = await self._task.kiq(number, TEXT)
        result = await task.wait_result(check_interval=self._poll_seconds, timeout=CALL_SECONDS)
        return result.return_value

    async def _flood(self, calls: int, in_flight: int) -> float:
        self._poll_seconds = _POLL_FLOOD_SECONDS
        try:
            return await super()._flood(calls, in_flight)
        finally:
            self._poll_seconds = _POLL_ALONE_SECONDS


CONTENDER = Contender(
    name="taskiq",
    about="taskiq, ListQueueBroker and RedisAsyncResultBackend of taskiq-redis, tight polling for results",
    modules=("taskiq", "taskiq_redis"),
    worker_commands=_worker_commands,
    open_client=TaskiqClient,
)
