"""Measure what open streams and announcements cost a gateway."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.streams import measure

__all__ = ["StreamCosts", "measure_streams"]

_CHATS = 20


@dataclass(frozen=True, kw_only=True)
class StreamCosts:
    """Costs of streams."""

    #: To open a stream, and its memory.
    opening_cpu_seconds: float
    bytes_per_stream: float
    #: For each event of a chat that is read, with one reader, and for each further reader.
    event_cpu_seconds: float
    delivery_cpu_seconds: float
    #: For each announcement of a chat without readers at this gateway, in the gateway and in Redis.
    foreign_cpu_seconds: float
    foreign_redis_cpu_seconds: float


def measure_streams(*, readers: int, events: int) -> StreamCosts:
    """Measure with one reader for each chat, and with many."""
    one, many = (
        asyncio.run(measure(readers=number, chats=_CHATS, events=events, per_second=50, database_url=None))
        for number in (_CHATS, readers)
    )

    def seconds(found: dict[str, object], name: str) -> float:
        return float(str(found[name])) / 1e6

    name, foreign = "gateway_cpu_us_per_event", "gateway_cpu_us_per_foreign_announcement"
    redis = "redis_cpu_us_per_foreign_announcement"
    return StreamCosts(
        opening_cpu_seconds=seconds(many, "gateway_cpu_us_per_opening"),
        bytes_per_stream=1024 * float(str(many["gateway_kib_per_stream"])),
        event_cpu_seconds=seconds(one, name),
        delivery_cpu_seconds=max(0.0, seconds(many, name) - seconds(one, name)) / (readers / _CHATS - 1),
        foreign_cpu_seconds=(seconds(one, foreign) + seconds(many, foreign)) / 2,
        foreign_redis_cpu_seconds=(seconds(one, redis) + seconds(many, redis)) / 2,
    )
