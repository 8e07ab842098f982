"""Check that the broker answers and that a lane has a worker, for commands that use an existing fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

from celery import Celery
from kombu.connection import Connection

from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import Settings
from broker_config.urls import is_redis, without_password
from messaging.queue_figures import lane_workers
from nekro_agent.errors import BrokerUnavailableError, ServiceError, SettingsError

__all__ = ["awaited_with_workers", "require_broker"]

T = TypeVar("T")

#: Calls that are answered within this time need no inspection of the workers, which takes a second.
_PATIENCE_SECONDS: Final = 2.0
#: Inspections before a lane counts as unserved: a worker that was just started needs some seconds.
_QUESTIONS: Final = 3


def require_broker(settings: Settings) -> None:
    """Return when the broker answers; code that makes no call would not detect that it is down.

    Raises:
        BrokerUnavailableError: it does not answer in time.
    """
    url = settings.broker.url or ""
    limit = settings.broker.connect_seconds
    try:
        if is_redis(url):
            with RedisEndpoint(settings.broker, url).client() as client:
                client.ping()
            return
        with Connection(url, connect_timeout=limit) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=limit)
    except SettingsError:
        raise
    except Exception as exc:  # each transport of kombu raises errors of its own driver
        raise BrokerUnavailableError(
            f"broker {without_password(url)} does not answer ({exc}); start it, or correct NEKRO_BROKER__URL"
        ) from exc


async def awaited_with_workers(work: Awaitable[T], app: Celery, *, lane: str) -> T:
    """Await ``work``, unless no worker serves its lane.

    Raises:
        ServiceError: no worker serves the lane after three inspections; ``work`` was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_QUESTIONS):
            done, _ = await asyncio.wait([task], timeout=_PATIENCE_SECONDS)
            if done or lane in await asyncio.to_thread(lane_workers, app):
                return await task
        raise ServiceError(f"no worker serves lane {lane}; start `nekro worker --lane {lane}` or `nekro up`")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
