"""The peer arq: an asyncio queue on a sorted set that workers and clients poll."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.harness.contender import CALL_SECONDS, TEXT, AsyncClient, Contender, Setup, probe
from benchmarks.harness.worker import worker_command

__all__ = ["CONTENDER", "ArqClient", "run_worker"]

_JOBS = 100
#: arq polls every 500 ms on both sides; these intervals gave it its best figures.
_POLL_SECONDS = 0.001
_POLL_FLOOD_SECONDS = 0.005


def run_worker(setup: Setup) -> None:
    """Run one worker until a signal ends it."""
    import logging

    from arq import Worker, func
    from arq.connections import RedisSettings

    logging.getLogger("arq").setLevel(logging.WARNING)

    async def run_probe(_: dict[str, Any], number: int, text: str) -> dict[str, Any]:
        return await probe(number, text)

    Worker(
        functions=[func(run_probe, name="probe")],  # type: ignore[arg-type]
        redis_settings=RedisSettings.from_dsn(setup.redis_url),
        max_jobs=_JOBS,
        poll_delay=_POLL_SECONDS,
    ).run()


class ArqClient(AsyncClient):
    """``enqueue_job`` and ``Job.result``."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._poll_seconds = _POLL_SECONDS
        super().__init__()

    async def open(self) -> None:
        from arq import create_pool
        from arq.connections import RedisSettings

        self._pool = await create_pool(RedisSettings.from_dsn(self._setup.redis_url))

    async def shut(self) -> None:
        await self._pool.aclose()

    async def call(self, number: int) -> object:
        from arq.jobs import ResultNotFound

        job = await self._pool.enqueue_job("probe", number, TEXT)
        assert job is not None  # a job of the same id
        wait = partial(job.result, timeout=CALL_SECONDS, poll_delay=self._poll_seconds)
        try:
            return await wait()
        except ResultNotFound:
            # arq looks for the result and then for the job; the job ended in between.
            return await wait()

    async def _flood(self, calls: int, in_flight: int) -> float:
        self._poll_seconds = _POLL_FLOOD_SECONDS
        try:
            return await super()._flood(calls, in_flight)
        finally:
            self._poll_seconds = _POLL_SECONDS


CONTENDER = Contender(
    name="arq",
    about=f"arq, {_JOBS} jobs at once, polled every {_POLL_SECONDS * 1000:.0f} ms on both sides",
    modules=("arq", "redis"),
    worker_commands=lambda setup: [worker_command(__name__)] * setup.workers,
    open_client=ArqClient,
)
