"""Check that the broker answers and that workers are there, for commands that use an existing fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

from broker_config.settings import Settings
from broker_config.urls import is_redis, without_password
from nekro.base.tasks import end_tasks
from nekro_agent.durations import REFRESH_SECONDS
from nekro_agent.errors import BrokerUnavailableError, ServiceError, SettingsError
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from celery import Celery

    from nekro.app.catalogue.fleet import FleetCatalogue

__all__ = ["awaited_with_workers", "require_broker", "require_workers"]

T = TypeVar("T")

#: Calls that are answered within this time need no inspection of the workers, which takes a second.
_PATIENCE_SECONDS: Final = 2.0
#: Inspections before a lane counts as unserved: a worker that was just started needs some seconds.
_QUESTIONS: Final = 3
#: How long a fleet counts as started while no worker has published; as long as those inspections take.
_PUBLISHED_SECONDS: Final = 10.0


def require_broker(settings: Settings) -> None:
    """Return when the broker answers; code that makes no call would not detect that it is down.

    Raises:
        BrokerUnavailableError: it does not answer in time.
    """
    url = settings.broker.url or ""
    limit = settings.broker.connect_seconds
    try:
        if is_redis(url):
            from broker_config.redis_endpoint import RedisEndpoint

            with RedisEndpoint(settings.broker, url).client() as client:
                client.ping()
            return
        from kombu.connection import Connection

        with Connection(url, connect_timeout=limit) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=limit)
    except SettingsError:
        raise
    except Exception as exc:  # each transport of kombu raises errors of its own driver
        raise BrokerUnavailableError(
            f"broker {without_password(url)} does not answer ({exc}); start it, or correct NEKRO_BROKER__URL"
        ) from exc


async def require_workers(read: Callable[[], Awaitable[FleetCatalogue]]) -> None:
    """Return when a worker is live in the catalogue; one that was just started needs some seconds.

    Args:
        read: reads the catalogue.

    Raises:
        ServiceError: none is.
        StorageUnavailableError: the database does not answer.
    """
    give_up_at = time.monotonic() + _PUBLISHED_SECONDS
    while not (await read()).is_live:
        if time.monotonic() > give_up_at:
            raise ServiceError(_unserved(Lane.METHODS.value))
        await asyncio.sleep(REFRESH_SECONDS)


def _unserved(lane: str) -> str:
    return f"no worker serves lane {lane}; start `nekro worker --lane {lane}` or `nekro up`"


async def awaited_with_workers(work: Awaitable[T], app: Callable[[], Celery], *, lane: str) -> T:
    """Await ``work``, unless no worker serves its lane.

    Raises:
        ServiceError: no worker serves the lane after three inspections; ``work`` was cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_QUESTIONS):
            done, _ = await asyncio.wait([task], timeout=_PATIENCE_SECONDS)
            if done or lane in await asyncio.to_thread(_served_lanes, app):
                return await task
        raise ServiceError(_unserved(lane))
    finally:
        await end_tasks(task)


def _served_lanes(app: Callable[[], Celery]) -> Iterable[str]:
    from nekro.broker.broker_figures import lane_workers

    return lane_workers(app())
