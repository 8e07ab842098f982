"""The result backend: Celery's, plus a push to the caller that waits.

A finished task is stored under its ordinary key and published on its ordinary channel, so
``AsyncResult``, Flower and scripts see it. When its message names a caller in ``reply_to``,
the same pipeline pushes the result to that caller's list, which saves the caller one
subscription per call. On an event loop all results of one tick travel in one pipeline, and
no result blocks the loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from celery import states
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError
from kombu.utils.encoding import bytes_to_str, str_to_bytes

from broker_config.bridge import at_loop_close, await_here, can_await
from broker_config.clients import async_client
from broker_config.keys import REPLY_SECONDS, Keys, is_caller_id
from broker_config.urls import url_of_backend

__all__ = ["ReplyBackend"]

#: A pipeline is sent when it holds this much; one call's large value must not wait for all others.
MAX_BATCH_BYTES: Final = 4 << 20
MAX_BATCH_RESULTS: Final = 256


@dataclass(frozen=True, kw_only=True)
class StoredResult:
    """One result on its way to Redis."""

    key: bytes
    payload: bytes
    #: None keeps the result for ever.
    expires_seconds: int | None
    #: List of the caller that waits; None when nobody named one.
    reply_key: str | None

    def queue_on(self, pipeline: Any) -> int:
        """Append this result's commands to a pipeline; returns how many."""
        pipeline.set(self.key, self.payload, ex=self.expires_seconds)
        pipeline.publish(self.key, self.payload)
        if self.reply_key is None:
            return 2
        pipeline.rpush(self.reply_key, self.payload)
        pipeline.expire(self.reply_key, REPLY_SECONDS)
        return 4


class ReplyBackend(RedisBackend):  # type: ignore[misc]
    """Stores results for Celery and pushes them to ``broker_config.calls.MethodCaller``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        prefix = self.app.conf.result_backend_transport_options.get("global_keyprefix", "")
        self._keys = Keys(prefix=prefix)
        self._writers: WeakKeyDictionary[asyncio.AbstractEventLoop, ResultWriter] = WeakKeyDictionary()

    def on_task_call(self, producer: Any, task_id: str) -> None:
        """Subscribe to nothing when a task is sent.

        Celery subscribes here already, which costs a round trip per call, leaks a channel
        per result that nobody waits for, and fails for good when Redis is down at the first
        call. ``AsyncResult.get`` subscribes by itself.
        """

    def _store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: str | None = None,
        request: Any = None,
        **kwargs: Any,
    ) -> Any:
        if state != states.SUCCESS and self._has_succeeded(task_id):
            return result  # a worker that was thought lost must not undo a success
        meta = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
        meta["task_id"] = bytes_to_str(task_id)
        payload = str_to_bytes(self.encode(meta))
        if len(payload) > self._MAX_STR_VALUE_SIZE:
            raise BackendStoreError("value too large for Redis backend", state=state, task_id=task_id)
        reply_to = getattr(request, "reply_to", None) if state in states.READY_STATES else None
        self._write(
            StoredResult(
                key=self.get_key_for_task(task_id),
                payload=payload,
                expires_seconds=(self.failure_expires if state == states.FAILURE else self.expires) or None,
                reply_key=self._keys.reply(reply_to) if is_caller_id(reply_to) else None,
            )
        )
        return result

    def _has_succeeded(self, task_id: str) -> bool:
        # Read without Celery's decoder: it would build exception classes from names in Redis.
        raw = self._read(self.get_key_for_task(task_id))
        return raw is not None and json.loads(raw).get("status") == states.SUCCESS

    def _set(self, key: bytes, value: bytes | str, expires: int | None = None) -> None:
        # As in Celery, with SET … EX: redis-py warns about SETEX.
        seconds = self.expires if expires is None else expires
        with self.client.pipeline() as pipeline:
            pipeline.set(key, value, ex=seconds or None).publish(key, value).execute()

    def _read(self, key: bytes) -> bytes | None:
        value: bytes | None
        value = await_here(self._writer().read(key)) if can_await() else self.client.get(key)
        return value

    def _write(self, stored: StoredResult) -> None:
        if can_await():
            await_here(self._writer().write(stored))
            return
        with self.client.pipeline(transaction=False) as pipeline:
            stored.queue_on(pipeline)
            pipeline.execute()

    def _sleep(self, amount: float) -> None:
        # Between two tries to store a result; the other tasks of the loop must go on.
        if can_await():
            await_here(asyncio.sleep(amount))
        else:
            super()._sleep(amount)

    def _writer(self) -> ResultWriter:
        loop = asyncio.get_running_loop()
        writer = self._writers.get(loop)
        if writer is None:
            conf = self.app.conf
            writer = self._writers[loop] = ResultWriter(
                url_of_backend(conf.result_backend),
                socket_timeout_seconds=conf.redis_socket_timeout,
                connect_timeout_seconds=conf.redis_socket_connect_timeout,
            )
            at_loop_close(writer.close)
        return writer


class ResultWriter:
    """Writes results of one event loop; those that come while one pipeline travels form the next."""

    def __init__(self, url: str, *, socket_timeout_seconds: float, connect_timeout_seconds: float) -> None:
        self._client = async_client(
            url,
            socket_timeout_seconds=socket_timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
        )
        self._waiting: list[tuple[StoredResult, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def read(self, key: bytes) -> Any:
        """Return the bytes under a key, None when there are none."""
        return await self._client.get(key)

    async def write(self, stored: StoredResult) -> None:
        """Store a result; returns when Redis has it.

        Raises:
            redis.RedisError: it could not be stored.
        """
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((stored, written))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        await written

    async def close(self) -> None:
        """Write what waits and close the connections."""
        if self._flusher is not None:
            await self._flusher
        await self._client.aclose()

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                try:
                    await self._send(batch)
                except Exception as exc:  # each writer gets it and decides about another try
                    for _, written in batch:
                        if not written.done():
                            written.set_exception(exc)
        finally:
            self._flusher = None

    def _next_batch(self) -> list[tuple[StoredResult, asyncio.Future[None]]]:
        count = size = 0
        for stored, _ in self._waiting[:MAX_BATCH_RESULTS]:
            count += 1
            size += len(stored.payload)
            if size >= MAX_BATCH_BYTES:
                break
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _send(self, batch: Sequence[tuple[StoredResult, asyncio.Future[None]]]) -> None:
        async with self._client.pipeline(transaction=False) as pipeline:
            counts = [stored.queue_on(pipeline) for stored, _ in batch]
            replies = await pipeline.execute(raise_on_error=False)
        start = 0
        for (_, written), count in zip(batch, counts, strict=True):
            own, start = replies[start : start + count], start + count
            failed = next((reply for reply in own if isinstance(reply, Exception)), None)
            if written.done():
                continue
            if failed is None:
                written.set_result(None)
            else:
                written.set_exception(failed)
