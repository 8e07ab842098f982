"""Many small writes to Redis, one round trip.

On a busy loop commands gather while a pipeline travels and form the next one; on an idle
loop a command leaves at once. Nothing waits for a timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis

__all__ = ["PipelineBatcher"]

#: A pipeline is sent when it holds this much: one large value must not hold up all others.
MAX_BATCH_BYTES: Final = 4 << 20
MAX_BATCH_WRITES: Final = 256


@dataclass(frozen=True, kw_only=True)
class _Write:
    queue_on: Callable[[Any], int]
    size_bytes: int
    done: asyncio.Future[list[Any]]


class PipelineBatcher:
    """Sends the writes of one event loop through one client, at most one pipeline at a time."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self._waiting: list[_Write] = []
        self._flusher: asyncio.Task[None] | None = None

    async def write(self, queue_on: Callable[[Any], int], *, size_bytes: int) -> list[Any]:
        """Send commands; returns their replies when Redis has executed them.

        Args:
            queue_on: appends the commands to a pipeline and returns how many they are.
            size_bytes: about how much they carry.

        Raises:
            redis.RedisError: the connection failed (the commands may have been executed)
                or Redis refused one of these commands.
        """
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Write(queue_on=queue_on, size_bytes=size_bytes, done=done))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        replies: list[Any] = await done
        return replies

    async def close(self) -> None:
        """Send what waits and close the connections."""
        if self._flusher is not None:
            await self._flusher
        await self.client.aclose()

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    await self._send(batch)
                except Exception as exc:  # each writer gets it and decides about another try
                    for write in batch:
                        if not write.done.done():
                            write.done.set_exception(exc)
        finally:
            self._flusher = None

    def _next_batch(self) -> list[_Write]:
        count = size = 0
        for write in self._waiting[:MAX_BATCH_WRITES]:
            count += 1
            size += write.size_bytes
            if size >= MAX_BATCH_BYTES:
                break
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _send(self, batch: list[_Write]) -> None:
        async with self.client.pipeline(transaction=False) as pipeline:
            counts = [write.queue_on(pipeline) for write in batch]
            replies = await pipeline.execute(raise_on_error=False)
        start = 0
        for write, count in zip(batch, counts, strict=True):
            own, start = replies[start : start + count], start + count
            if write.done.done():
                continue  # its waiter was cancelled
            refused = next((reply for reply in own if isinstance(reply, Exception)), None)
            if refused is None:
                write.done.set_result(own)
            else:
                write.done.set_exception(refused)
