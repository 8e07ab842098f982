"""Redis clients for event loops."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from broker_config.urls import client_url, is_redis

__all__ = ["async_client"]


def async_client(
    url: str, *, socket_timeout_seconds: float, connect_timeout_seconds: float, health_check_seconds: int = 10
) -> Redis:
    """Build a client whose every exchange is bounded and tried once.

    redis-py would repeat a failed command three times with growing pauses; here whoever
    sends a command decides whether to repeat it.
    """
    assert is_redis(url)  # noqa: S101 - settings were checked when the app was built
    return Redis.from_url(
        client_url(url),
        socket_timeout=socket_timeout_seconds,
        socket_connect_timeout=connect_timeout_seconds,
        health_check_interval=health_check_seconds,
        retry=Retry(NoBackoff(), 0),
    )
