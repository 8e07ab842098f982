"""Limits of keys, requests per minute, and of the streams that are open.

A key may use its minute at once; then requests come back one by one (the generic cell rate algorithm). Redis
counts them for all gateways together. While it does not answer, each gateway counts by itself, so N gateways
admit at most N times the rate. Answers have the headers of the IETF's draft-ietf-httpapi-ratelimit-headers.

The open streams of the process, of one key and of one address are counted in each process.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from loguru import logger

from broker_config.keys import Keys
from broker_config.redis_library import redis
from broker_config.settings import GatewaySettings, Settings
from nekro.broker.redis.link import RedisLink, Script
from nekro.operations.actor import Identity, RefusedError
from nekro_agent.durations import FRESH_SECONDS
from nekro_agent.errors import OverloadedError

__all__ = [
    "OpenStreams",
    "Rates",
]


_MINUTE: Final = 60.0
#: KEYS: time at which all requests so far have been paid for. ARGV: seconds per request. Returns the seconds
#: until this one is paid for too; above 60 it is not admitted.
_TAKE: Final = Script(
    """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local paid = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), now) + ARGV[1]
if paid - now <= 60 then
  redis.call('SET', KEYS[1], string.format('%.6f', paid), 'PX', math.ceil((paid - now) * 1000))
end
return tostring(paid - now)
"""
)


class Rates:
    """Counts requests by key; one instance per process."""

    def __init__(self, settings: Settings) -> None:
        """Take ``settings`` with every URL resolved; the first request connects."""
        self._link = RedisLink(settings.broker, settings.results.url or settings.broker.url)
        self._keys = Keys(prefix=settings.broker.key_prefix)
        self._default = settings.gateway.requests_per_minute
        self._own: dict[str, float] = {}
        #: When Redis is asked again; 0: it answers.
        self._asks_again_at = 0.0

    async def take(self, identity: Identity) -> dict[str, str]:
        """Count a request; returns headers that say how many more the key may make, none without a limit.

        Raises:
            RefusedError: 429, there were too many.
        """
        rate = identity.requests_per_minute
        rate = self._default if rate is None else rate
        if identity.key_id is None or not rate:
            return {}
        owed = await self._take(identity.key_id, _MINUTE / rate)
        headers = _headers(rate, owed)
        if owed > _MINUTE:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "rate_exceeded",
                f"the key may make {rate} requests per minute",
                headers={"Retry-After": str(math.ceil(owed - _MINUTE))} | headers,
            )
        return headers

    async def close(self) -> None:
        """Close the connection."""
        await self._link.close()

    async def _take(self, key_id: str, seconds: float) -> float:
        now = time.monotonic()
        if now < self._asks_again_at:
            return self._take_here(key_id, seconds)
        if self._asks_again_at:  # one request asks whether Redis answers again, the others do not wait for it
            self._asks_again_at = now + FRESH_SECONDS
        try:
            owed = float(await self._link.run(_TAKE, [self._keys.rate(key_id)], repr(seconds)))
        except (redis.RedisError, OSError) as exc:
            logger.bind(error=str(exc)).warning("rate_counted_by_this_gateway_only")
            self._asks_again_at = time.monotonic() + FRESH_SECONDS
            return self._take_here(key_id, seconds)
        self._asks_again_at = 0.0
        return owed

    def _take_here(self, key_id: str, seconds: float) -> float:
        now = time.monotonic()
        paid = max(self._own.get(key_id, 0.0), now) + seconds
        if paid - now <= _MINUTE:
            self._own[key_id] = paid
        return paid - now


def _headers(rate: int, owed: float) -> dict[str, str]:
    """Return the policy, and what is left of it: requests, and seconds until all of them are there again.

    Args:
        owed: seconds until all requests so far have been paid for.
    """
    left = max(0, math.floor((_MINUTE - owed) * rate / _MINUTE + 1e-6))
    seconds = math.ceil(min(owed, _MINUTE))
    return {
        "RateLimit-Policy": f'"key";q={rate};w={_MINUTE:.0f}',
        "RateLimit": f'"key";r={left};t={seconds}',
    }


#: Open streams of one process; each takes about 100 KB.
_MOST_STREAMS: Final = 10_000
#: When a refused client may try again; when a stream ends cannot be known.
_RETRY_SECONDS: Final = 5
#: A network that one host or home has as a whole.
_IPV6_PREFIX: Final = 64


class OpenStreams:
    """Counts open streams; one instance per process."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Count from 0; the limits are ``streams_per_key`` and ``streams_per_address``."""
        self._settings = settings
        self._open = 0
        self._keys: Counter[str] = Counter()
        self._addresses: Counter[str] = Counter()

    @contextmanager
    def counted(self, *, key_id: str | None, host: str | None) -> Iterator[None]:
        """Count a stream inside the block.

        Args:
            key_id: None for a stream without a key.
            host: address of the client; None on a Unix socket.

        Raises:
            OverloadedError: the process has as many as it may have.
            RefusedError: 429, the key or the address has as many as it may have.
        """
        if self._open >= _MOST_STREAMS:
            raise OverloadedError(
                f"this gateway has {_MOST_STREAMS} open streams; close some, or connect to another gateway"
            )
        address = None if host is None else _network(host)
        _require(self._keys, key_id, self._settings.streams_per_key, "the key")
        _require(self._addresses, address, self._settings.streams_per_address, "the address")
        taken = [(c, name) for c, name in ((self._keys, key_id), (self._addresses, address)) if name]
        self._open += 1
        for counter, name in taken:
            counter[name] += 1
        try:
            yield
        finally:
            self._open -= 1
            for counter, name in taken:
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]


def _require(counter: Counter[str], name: str | None, limit: int, what: str) -> None:
    if name is not None and limit and counter[name] >= limit:
        raise RefusedError(
            HTTPStatus.TOO_MANY_REQUESTS,
            "too_many_streams",
            f"{what} has {limit} open streams of this gateway; close some",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )


def _network(host: str) -> str:
    """Return the address, or of IPv6 its network, whose addresses one client can use in turn."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
