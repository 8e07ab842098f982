"""Publishing events from coroutines: off the event loop, in bounded time, never fatal.

An event announces a row that is committed already. One that cannot be published is logged
and left to the sweep, which finds rows that nobody announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from celery import Celery
from celery.app.task import Context
from loguru import logger

from broker_config.call_messages import CallMessage
from broker_config.revocations import revoke
from broker_config.topology import (
    JOB_TASK,
    count_waiting,
    publish_event,
    publish_round_requested,
    rounds_waiting,
)
from nekro_agent.errors import NekroError
from nekro_agent.methods import Lane
from storage.calls import Call

__all__ = ["EventPublisher"]

T = TypeVar("T")

#: kombu publishes with blocking sockets; two threads keep a slow one from holding the next.
_THREADS: Final = 2
#: How long an event waits that lets a follow-up round's request leave first: publishing takes the
#: interpreter from the event loop.
_LATER_SECONDS: Final = 0.1
#: With so many of them waiting, the next one is published as all others are.
_MOST_LATER: Final = 64


class EventPublisher:
    """Publishes to ``agent.events`` for one process."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="publish")
        self._later: dict[object, Callable[[], object]] = {}

    async def round_requested(self, chat_key: str, *, later: bool = False) -> None:
        """Tell the rounds lane that a chat has a requested round.

        Args:
            later: return at once and publish in a moment.
        """
        send = partial(publish_round_requested, self._app, chat_key)
        await (self._publish_later if later else self._publish)("round.requested", send)

    async def rounds_overdue(self, chat_keys: Sequence[str]) -> int:
        """Tell it again of chats that wait, unless as many messages wait: workers are behind, no more.

        Returns how many were sent.
        """
        waiting = await self._publish("rounds.waiting", partial(rounds_waiting, self._app)) or 0
        if waiting >= len(chat_keys):
            return 0
        for chat_key in chat_keys:
            await self.round_requested(chat_key)
        return len(chat_keys)

    async def job_queued(self, job_id: str) -> None:
        """Put a job on lane ``long``; its worker claims the row, so a second message does no harm."""
        send = partial(self._app.send_task, JOB_TASK, args=[job_id], task_id=job_id, queue=Lane.LONG.value)
        await self._publish("job.queued", send)

    async def calls_lost(self, messages: Sequence[CallMessage]) -> int:
        """Send calls again whose queue has nothing that waits; returns how many."""
        send = partial(_send_lost, self._app, messages)
        return await self._publish("call.queued", send) or 0

    async def call_ended(self, call: Call, error: NekroError) -> None:
        """Answer whoever waits for a call that no worker will answer any more."""
        reply_to = (call.invocation or {}).get("reply_to")
        request = Context(
            id=call.id, task=call.method, reply_to=reply_to, errbacks=None, chord=None, group=None
        )
        backend = self._app.backend
        await self._publish("call.ended", partial(backend.mark_as_failure, call.id, error, request=request))

    async def revoke(self, *task_ids: str) -> None:
        """Have running tasks stopped, and those that wait dropped, by workers that are up."""
        send = partial(revoke, self._app, list(task_ids))
        await self._publish("tasks.revoked", send)

    async def event(self, name: str, chat_key: str, body: Mapping[str, Any], *, later: bool = False) -> None:
        """Tell whoever listens that something happened in a chat, for example ``message.sent``.

        Args:
            later: return at once and publish in a moment.
        """
        send = partial(publish_event, self._app, name, chat_key, body)
        await (self._publish_later if later else self._publish)(name, send)

    def tell(self, name: str, chat_key: str, body: Mapping[str, Any], *, later: bool = False) -> None:
        """As ``event``, for watchers only: returns at once."""
        send = partial(publish_event, self._app, name, chat_key, dict(body))
        if later and len(self._later) < _MOST_LATER:
            self._put_off(name, send)
        else:
            self._pool.submit(_attempt, name, send)

    def close(self) -> None:
        """Let running publications end and take no more; what only watchers wait for is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for key in list(self._later):
            self._send_later(key)

    async def _publish_later(self, name: str, send: Callable[[], object]) -> None:
        if len(self._later) >= _MOST_LATER:
            await self._publish(name, send)
            return
        self._put_off(name, send)

    def _put_off(self, name: str, send: Callable[[], object]) -> None:
        key = object()
        self._later[key] = partial(_attempt, name, send)
        asyncio.get_running_loop().call_later(_LATER_SECONDS, self._submit_later, key)

    def _submit_later(self, key: object) -> None:
        with suppress(RuntimeError):  # closed meanwhile, which has published it
            self._pool.submit(self._send_later, key)

    def _send_later(self, key: object) -> None:
        if (attempt := self._later.pop(key, None)) is not None:
            attempt()

    async def _publish(self, name: str, send: Callable[[], T]) -> T | None:
        return await asyncio.get_running_loop().run_in_executor(self._pool, _attempt, name, send)


def _send_lost(app: Celery, messages: Sequence[CallMessage]) -> int:
    sent = 0
    with app.producer_or_acquire() as producer:
        for lane in sorted({message.lane for message in messages}):
            queue = app.amqp.queues[lane]
            if count_waiting(queue, producer.channel):
                continue  # workers are behind, and the messages may be among those
            for message in messages:
                if message.lane == lane:
                    app.amqp.send_task_message(
                        producer, message.invocation.method, message.build(app), queue=queue
                    )
                    sent += 1
    return sent


def _attempt(name: str, send: Callable[[], T]) -> T | None:
    try:
        return send()
    except Exception as exc:  # the row is committed and the sweep announces it again
        logger.bind(event=name, error=type(exc).__name__).warning("event_not_published")
        return None
