"""Calling a plugin method from an event loop: publish, wait, read the envelope or raise.

One ``MethodCaller`` serves all calls of a process. Workers push finished results to its own
reply list; a reply that a broken connection swallowed is read again from its result key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from celery import Celery, states
from pydantic import ValidationError
from redis import RedisError
from redis.asyncio import Redis

from broker_config.clients import async_client
from broker_config.embedded import resolve_signing_key
from broker_config.failures import failure_from_record
from broker_config.keys import Keys
from broker_config.publishing import PUBLISH_SECONDS, Publisher, make_publisher, unavailable
from broker_config.settings import Settings
from broker_config.wire import Envelope, Invocation, Signer, new_id
from nekro_agent.errors import CallTimeoutError, MessageRefusedError
from nekro_agent.methods import Lane

__all__ = ["MethodCaller"]

#: How long one blocking pop waits, at most.
POP_SECONDS: Final = 2
#: Replies fetched at once after a first one.
POP_COUNT: Final = 256
#: A call older than this is looked up under its result key, in this rhythm.
REREAD_SECONDS: Final = 1.0
REREAD_KEYS: Final = 100
#: Pause before the reply list is asked again after an error.
RECONNECT_SECONDS: Final = 0.2
#: Extra time, beyond the deadline, after which a worker gives a call up for good.
HARD_LIMIT_GRACE_SECONDS: Final = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A call that waits for its reply."""

    record: asyncio.Future[dict[str, Any]]
    since: float


class MethodCaller:
    """Calls methods over the broker; ``start`` and ``close`` it on the loop that uses it."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._signer = Signer.from_text(resolve_signing_key(settings).get_secret_value())
        self._caller_id = new_id()
        self._reply_key = Keys(prefix=settings.broker.key_prefix).reply(self._caller_id)
        self._pending: dict[str, _Pending] = {}
        self._publisher: Publisher | None = None
        self._popper: Redis | None = None
        self._reader: Redis | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._revocations: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to listen for replies. Redis need not be there yet; it is waited for."""
        if self._tasks:
            return
        self._publisher = make_publisher(self._app, self._settings.broker)
        # Apart, because a blocking pop occupies its connection.
        self._popper, self._reader = self._client(), self._client()
        self._tasks = [
            asyncio.create_task(self._listen(self._popper), name="nekro-replies"),
            asyncio.create_task(self._reread_forever(self._reader), name="nekro-rereads"),
        ]

    async def close(self) -> None:
        """Stop listening, delete the reply list, and cancel every call that still waits."""
        tasks, self._tasks = self._tasks, []
        await _end({*tasks, *self._revocations})
        for pending in self._pending.values():
            pending.record.cancel()
        if self._reader is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._reader.delete(self._reply_key)
        for client in (self._popper, self._reader):
            if client is not None:
                await client.aclose()
        if self._publisher is not None:
            await self._publisher.close()
        self._publisher = self._popper = self._reader = None

    async def __aenter__(self) -> MethodCaller:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, invocation: Invocation, *, lane: Lane | str) -> Envelope:
        """Run a method on some worker and return what it returned.

        Args:
            lane: a lane, or the name of a pinned plugin's queue. An unknown name is a
                ``KeyError``: queues are declared in settings.

        Raises:
            BrokerUnavailableError: the broker does not answer within about 6 s. It may have
                taken the message; a repetition under the same call id is recognised.
            CallTimeoutError: the deadline passed, in the queue or while the method ran. The
                worker is asked to stop it.
            CallCancelledError: the call was revoked.
            MethodFailedError: the method raised; the error names the plugin's exception.
            MethodNotFoundError, ArgumentError, ResultError, …: the worker raised this error
                of our tree.
            MessageRefusedError: the answer is no envelope of this call, or a call of this
                id is already under way here.
        """
        call_id = invocation.call_id
        if self._publisher is None:
            raise RuntimeError("MethodCaller.call before start or after close")
        if call_id in self._pending:
            raise MessageRefusedError(f"call {call_id} is already under way")
        queue = self._app.amqp.queues[str(lane)].name
        remaining = invocation.remaining_seconds()
        if remaining <= 0:
            raise CallTimeoutError(f"{invocation.method}: the deadline of call {call_id} has passed")
        record = asyncio.get_running_loop().create_future()
        self._pending[call_id] = _Pending(record=record, since=time.monotonic())
        try:
            async with asyncio.timeout(remaining) as limit:
                await self._publisher.send(self._message(invocation, remaining), queue=queue)
                answer = await record
        except TimeoutError as exc:
            if not limit.expired():
                raise
            self._revoke_soon(call_id)
            raise CallTimeoutError(
                f"{invocation.method}: no answer to call {call_id} before its deadline"
            ) from exc
        finally:
            del self._pending[call_id]
        return _envelope(invocation, answer)

    async def revoke(self, call_id: str, *, terminate: bool = True) -> None:
        """Tell all workers that are up to drop a call.

        Args:
            terminate: also stop it when it already runs.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        loop = asyncio.get_running_loop()
        told = loop.run_in_executor(None, lambda: self._app.control.revoke(call_id, terminate=terminate))
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                await told
        except Exception as exc:
            raise unavailable(self._settings.broker.url, exc) from exc

    def _message(self, invocation: Invocation, remaining: float) -> Any:
        return self._app.amqp.create_task_message(
            invocation.call_id,
            invocation.method,
            [self._signer.sign(invocation)],
            {},
            expires=invocation.deadline.isoformat(),
            soft_time_limit=remaining,
            time_limit=remaining + HARD_LIMIT_GRACE_SECONDS,
            reply_to=self._caller_id,
        )

    def _revoke_soon(self, call_id: str) -> None:
        async def revoke() -> None:
            try:
                await self.revoke(call_id)
            except Exception as exc:  # its worker stops it at the deadline anyway
                logger.warning("cannot revoke call %s: %s", call_id, exc)

        task = asyncio.create_task(revoke())
        self._revocations.add(task)
        task.add_done_callback(self._revocations.discard)

    def _client(self) -> Redis:
        url = self._settings.results.url or self._settings.broker.url
        assert url is not None  # noqa: S101 - checked when the app was built
        return async_client(
            url,
            socket_timeout_seconds=self._settings.broker.socket_timeout_seconds,
            connect_timeout_seconds=self._settings.broker.connect_timeout_seconds,
        )

    async def _listen(self, client: Redis) -> None:
        while True:
            try:
                await self._pop(client)
            except (RedisError, OSError) as exc:
                logger.warning("replies cannot be read, trying again: %s", exc)
                await asyncio.sleep(RECONNECT_SECONDS)
            except Exception:  # calls wait on this loop, whatever one reply held
                logger.exception("a reply could not be handled")

    async def _pop(self, client: Redis) -> None:
        # Well below the socket timeout, so that a silent Redis can be told from an empty list.
        seconds = min(POP_SECONDS, self._settings.broker.socket_timeout_seconds / 2)
        popped = await client.blpop([self._reply_key], timeout=seconds)
        if popped is None:
            return
        self._settle(popped[1])
        if self._pending:
            for raw in await client.lpop(self._reply_key, POP_COUNT) or ():
                self._settle(raw)

    async def _reread_forever(self, client: Redis) -> None:
        """Look up old calls under their result keys: a pop whose reply got lost took it from the list."""
        while True:
            await asyncio.sleep(REREAD_SECONDS)
            old = time.monotonic() - REREAD_SECONDS
            calls = [call_id for call_id, pending in self._pending.items() if pending.since <= old]
            try:
                for start in range(0, len(calls), REREAD_KEYS):
                    keys = [
                        self._app.backend.get_key_for_task(call_id)
                        for call_id in calls[start : start + REREAD_KEYS]
                    ]
                    for raw in await client.mget(keys):
                        if raw is not None:
                            self._settle(raw)
            except (RedisError, OSError) as exc:
                logger.debug("results cannot be read again: %s", exc)

    def _settle(self, raw: Any) -> None:
        """Give a stored result to the call that waits for it; anything else is dropped."""
        try:
            record = json.loads(raw)
        except ValueError:
            logger.warning("a reply of %d bytes is not JSON; dropped", len(raw))
            return
        if not isinstance(record, dict) or record.get("status") not in states.READY_STATES:
            return
        pending = self._pending.get(str(record.get("task_id")))
        if pending is not None and not pending.record.done():
            pending.record.set_result(record)


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel tasks until they end: one cancellation gets lost when it meets a timeout inside redis-py."""
    while pending := {task for task in tasks if not task.done()}:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=0.1)


def _envelope(invocation: Invocation, record: Mapping[str, Any]) -> Envelope:
    if record["status"] != states.SUCCESS:
        raise failure_from_record(record)
    try:
        envelope = Envelope.model_validate(record.get("result"))
    except ValidationError as exc:
        raise MessageRefusedError(
            f"call {invocation.call_id}: the worker answered with something that is no envelope"
        ) from exc
    if envelope.call_id != invocation.call_id:
        raise MessageRefusedError(f"call {invocation.call_id}: the answer belongs to {envelope.call_id}")
    return envelope
