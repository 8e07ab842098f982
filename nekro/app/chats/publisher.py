"""Publishes requests and announcements from coroutines, in bounded time and without raising: requests on
threads, because kombu blocks, and announcements on the loop's own connection.

An announcement names a row that is already committed. If it cannot be published, that is logged. Readers of
events find the row by themselves, and the sweep repeats what workers must hear.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from loguru import logger

from broker_config.app import NekroApp
from nekro.broker.announcements import Announcer
from nekro.broker.celery.names import request_of
from nekro.broker.celery.remote_control import name_request, revoke, revoke_request
from nekro.broker.chat_messages import (
    count_of_lane,
    request_overdue,
    request_round,
    send_call,
    send_job,
    send_lost,
)
from nekro.broker.delivery.messages import CallMessage
from nekro_agent.durations import DEFER_SECONDS
from nekro_agent.errors import NekroError
from nekro_agent.methods import Lane
from storage.repositories.calls import Call

if TYPE_CHECKING:
    from storage.repositories.jobs import Job

__all__ = ["EventPublisher"]

T = TypeVar("T")

#: kombu publishes with blocking sockets; with two threads a slow publication does not delay the next.
_THREADS: Final = 2
#: Most delayed requests; further ones are published without delay.
_MOST_LATER: Final = 64


class EventPublisher:
    """Publishes what the rows of one process announce."""

    def __init__(self, app: NekroApp, *, adapters: Collection[str] = ()) -> None:
        """Create it; ``close`` it.

        Args:
            adapters: keys of the adapters whose clients fetch what the agent sends.
        """
        self._app, self.adapters = app, frozenset(adapters)
        self._announcer = Announcer(app.nekro_settings)
        #: For each server that chats are partitioned over, so that one that is down delays no other.
        self._pools = [ThreadPoolExecutor(_THREADS, thread_name_prefix="publish") for _ in app.servers]
        self._later = [_DelayedRequests(pool) for pool in self._pools]
        #: Called with the chat, number and types of each announcement; must neither block nor raise.
        self.listeners: list[Callable[[str, int, frozenset[str]], None]] = []

    async def round_requested(self, chat_key: str, *, later: bool = False) -> None:
        """Announce to the rounds lane that a chat has a requested round.

        Args:
            later: return at once and publish after a short delay.
        """
        server, send = self._server_of(chat_key), partial(request_round, self._app, chat_key)
        if not (later and self._later[server].add("round.requested", send)):
            await self._publish("round.requested", send, server)

    async def rounds_overdue(self, chat_keys: Sequence[str]) -> int:
        """Announce waiting chats again, unless as many messages wait: then the workers are only behind.

        Returns the number of messages sent.
        """
        return await self._each_server("round.requested", request_overdue, chat_keys, lambda key: key)

    async def job_queued(self, job_id: str, chat_key: str) -> None:
        """Publish a job on lane ``long``; the worker claims its row, so a second message is harmless."""
        send = partial(send_job, self._app, job_id, chat_key)
        await self._publish("job.queued", send, self._server_of(chat_key))

    async def jobs_overdue(self, jobs: Sequence[Job], *, queued: int, owned: Collection[str] = ()) -> int:
        """Publish queued jobs again, unless no message is missing: then the workers are only behind.

        Returns the number of messages sent.

        Args:
            queued: number of all queued jobs; each has a message.
            owned: queues of owners of plugins, which have some of the messages.
        """
        lanes = [(one, Lane.LONG.value) for one in self._app.servers]
        lanes += [(self._app, queue) for queue in owned]
        counts = await asyncio.gather(
            *(
                self._publish("jobs.waiting", partial(count_of_lane, one, lane), one.server)
                for one, lane in lanes
            )
        )
        if sum(count or 0 for count in counts) >= queued:
            return 0
        for job in jobs:
            await self.job_queued(job.id, job.chat_key)
        return len(jobs)

    async def call_queued(self, message: CallMessage) -> None:
        """Publish a recorded call that no caller waits for; the sweep sends it again if that fails."""
        send = partial(send_call, self._app, message)
        await self._publish("call.queued", send, self._server_of(message.invocation.chat_key))

    async def calls_lost(self, messages: Sequence[CallMessage]) -> int:
        """Send calls again whose queue has no waiting messages; returns the number sent."""
        return await self._each_server(
            "call.queued", send_lost, messages, lambda message: message.invocation.chat_key
        )

    async def call_ended(self, call: Call, error: NekroError) -> None:
        """Send an error to the caller of a call that no worker will answer."""
        request = request_of(call.id, call.method, (call.invocation or {}).get("reply_to"))
        server = self._server_of(call.chat_key)
        backend = self._app.servers[server].backend
        send = partial(backend.mark_as_failure, call.id, error, request=request)
        await self._publish("call.ended", send, server)

    async def revoke(self, *task_ids: str) -> None:
        """Stop running tasks, and drop waiting ones, on all workers that are running."""
        send = partial(revoke, self._app, list(task_ids))
        await self._publish("tasks.revoked", send)

    async def name_request(self, digest: str, call_id: str) -> None:
        """Keep which call a client's request causes; ``revoke_request`` finds it, also in another process."""
        await self._publish("request.named", partial(name_request, self._app, digest, call_id))

    def revoke_request(self, digest: str) -> None:
        """Revoke the call that a client's request causes, if one is known; returns at once.

        Whoever asks for it may be cancelled before it has happened.
        """
        send = partial(revoke_request, self._app, digest)
        with suppress(RuntimeError):  # the process is closing
            self._pools[0].submit(_attempt, "tasks.revoked", send)

    def events_added(
        self, chat_key: str, number: int, *, types: frozenset[str] = frozenset(), later: bool = False
    ) -> None:
        """Announce that a chat has events up to ``number``; returns at once. Call it on an event loop.

        Args:
            types: of the events; none: unknown.
            later: publish after a short delay.
        """
        for listener in self.listeners:
            listener(chat_key, number, types)
        self._announcer.added(chat_key, number, types, delay_seconds=2 * DEFER_SECONDS if later else 0)

    def live(self, chat_key: str, event: Mapping[str, Any]) -> bool:
        """Publish a live event; returns at once. Call it on an event loop.

        False: it was dropped, because too many wait or the publisher was closed.
        """
        return self._announcer.live(chat_key, event)

    async def close(self) -> None:
        """Finish running publications and accept no more, on the loop of the services."""
        await asyncio.gather(asyncio.to_thread(self._close_pools), self._announcer.close())

    def _close_pools(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)
        for delayed in self._later:
            delayed.send_all()

    async def _publish(self, name: str, send: Callable[[], T], server: int = 0) -> T | None:
        return await asyncio.get_running_loop().run_in_executor(self._pools[server], _attempt, name, send)

    async def _each_server(
        self,
        name: str,
        send: Callable[[NekroApp, Sequence[T]], int],
        items: Sequence[T],
        chat_of: Callable[[T], str],
    ) -> int:
        """Send items to the servers of their chats, at the same time; returns how many were sent."""
        by_server: dict[int, list[T]] = {}
        for item in items:
            by_server.setdefault(self._server_of(chat_of(item)), []).append(item)
        counts = await asyncio.gather(
            *(self._publish(name, partial(send, self._app, group), n) for n, group in by_server.items())
        )
        return sum(count or 0 for count in counts)

    def _server_of(self, chat_key: str) -> int:
        """Return the number of the server that is the best for a chat."""
        return self._app.chats.order(chat_key)[0]


class _DelayedRequests:
    """Requests that are published after a delay, in the order given."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = Lock()

    def add(self, name: str, send: Callable[[], object]) -> bool:
        """Delay a request; False when too many wait."""
        if len(self._waiting) >= _MOST_LATER:
            return False
        self._waiting.append(partial(_attempt, name, send))
        asyncio.get_running_loop().call_later(2 * DEFER_SECONDS, self._submit)
        return True

    def send_all(self) -> None:
        """Publish all waiting requests in the calling thread."""
        while self._waiting:
            self._send_oldest()

    def _submit(self) -> None:
        with suppress(RuntimeError):  # the pool was closed, and ``close`` has published the request
            self._pool.submit(self._send_oldest)

    def _send_oldest(self) -> None:
        with self._lock:  # two threads of the pool must not change the order
            if self._waiting:
                self._waiting.popleft()()


def _attempt(name: str, send: Callable[[], T]) -> T | None:
    try:
        return send()
    except Exception as exc:  # the row is committed, and the sweep announces it again
        logger.bind(event=name, error=type(exc).__name__).warning("event_not_published")
        return None
