"""Reads the clock of the broker, for comparison with this host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker_config.settings import BrokerSettings
from broker_config.urls import is_redis
from nekro.broker.redis.link import RedisLink
from nekro_agent.shared_clock import Reading, read_clock

__all__ = ["read_broker_clock"]


async def read_broker_clock(
    broker: BrokerSettings, *, host_clock: Callable[[], float] = time.time
) -> Reading | None:
    """Compare this host's clock with that of Redis; None for other brokers, whose clock cannot be read.

    Raises:
        redis.RedisError, OSError: Redis does not answer.
    """
    if broker.url is None or not is_redis(broker.url):
        return None
    link = RedisLink(broker, broker.url)

    async def ask() -> float:
        seconds, microseconds = await link.execute("TIME")
        return int(seconds) + int(microseconds) / 1_000_000

    try:
        return await read_clock(ask, host_clock=host_clock)
    finally:
        link.abort()
