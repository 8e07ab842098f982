"""Watches ``agent.events`` from outside of the workers, with a temporary queue per watcher.

On RabbitMQ such a queue expires. A Redis list has no owner, so a watcher renews a presence key, and
``drop_abandoned`` deletes the queues of watchers that were killed; otherwise such a queue would collect
events forever.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import redis
from celery import Celery
from kombu.entity import Queue
from kombu.exceptions import ChannelError, ConnectionError, KombuError

from broker_config.keys import ABANDONED_SECONDS, Keys
from broker_config.redis_endpoint import RedisEndpoint
from broker_config.settings import BrokerSettings
from broker_config.topology import AGENT_EVENTS, encode_chat_key
from broker_config.urls import is_redis
from nekro.broker.celery.names import delete_binding
from nekro.broker.publishing import unavailable
from nekro.wire.invocation import new_id
from nekro_agent.durations import POLL_SECONDS

__all__ = ["EventWatcher", "WatchedEvent", "drop_abandoned"]

#: Prefix of the queues of watchers, followed by the watcher's id.
WATCH_PREFIX: Final = "watch."
#: How often a watcher renews its presence in the time that its queue is kept without.
RENEWALS: Final = 12
#: Maximum number of queued events of a slow watcher; more are dropped and counted.
MAX_WAITING: Final = 1000
#: Maximum number of events per poll.
MAX_POLL: Final = 200
#: Routing keys of ``EVENTS_ADDED`` and ``LIVE_EVENT``, of any chat.
_OF_ALL: Final = "events.#"
#: Errors of the drivers when the broker does not answer.
_AWAY: Final = (KombuError, ChannelError, ConnectionError, redis.RedisError, OSError)


@dataclass(frozen=True, kw_only=True)
class WatchedEvent:
    """One event of a chat; ``name`` is without the chat, ``body`` is empty for task messages."""

    name: str
    body: Mapping[str, Any]


class EventWatcher:
    """Receives the events of one chat, or those about events of all; blocking, for one thread at a time."""

    def __init__(self, app: Celery, settings: BrokerSettings, *, chat_key: str | None) -> None:
        """Open nothing yet.

        Args:
            chat_key: None receives ``events.added`` and ``events.live`` of all chats.
        """
        assert settings.url is not None  # noqa: S101 - checked when the app was built
        self._app, self._settings, self._url = app, settings, settings.url
        self._id = new_id()
        self._pattern = _OF_ALL if chat_key is None else f"#.{encode_chat_key(chat_key)}"
        self._connection: Any = None
        self._queue: Any = None
        self._renewed_at = 0.0
        #: Number of events that were dropped because they were not polled fast enough.
        self.dropped = 0

    def __enter__(self) -> Self:
        """Bind the queue; events that are published from now on are received.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        try:
            self._connect()
        except _AWAY as exc:
            self._disconnect()
            raise unavailable(self._url, exc) from exc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._queue is not None:
                self._queue.delete()
            if is_redis(self._url):
                # A publisher that read the binding before it was deleted creates the list again.
                time.sleep(4 * POLL_SECONDS)
                name = f"{self._settings.key_prefix}{WATCH_PREFIX}{self._id}"
                with _client(self._settings) as client:
                    client.delete(self._presence_key, name)
        except _AWAY:  # the broker does not answer: the queue expires
            pass
        self._disconnect()

    def poll(self) -> list[WatchedEvent]:
        """Return the events since the last poll, in order, without waiting.

        After a lost connection the next poll reconnects; events in between are lost.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        try:
            if self._queue is None:
                self._connect()
            if time.monotonic() - self._renewed_at > ABANDONED_SECONDS / RENEWALS:
                self._renew()
            return self._fetch()
        except _AWAY as exc:
            self._disconnect()
            raise unavailable(self._url, exc) from exc

    @property
    def _presence_key(self) -> str:
        return Keys(prefix=self._settings.key_prefix).watcher(self._id)

    def _connect(self) -> None:
        self._connection = self._app.connection_for_write()  # whose waits are bounded
        self._connection.ensure_connection(
            max_retries=1, interval_start=0, timeout=self._settings.connect_seconds
        )
        bounds: dict[str, Any] = {}
        if not is_redis(self._url):
            bounds = {"expires": ABANDONED_SECONDS, "max_length": MAX_WAITING}
        queue = Queue(
            f"{WATCH_PREFIX}{self._id}",
            exchange=AGENT_EVENTS,
            routing_key=self._pattern,
            durable=False,
            **bounds,
        )
        self._queue = queue(self._connection.default_channel)
        self._renew()

    def _renew(self) -> None:
        """Renew the presence key and the binding, because a Redis that lost its data has lost both."""
        if is_redis(self._url):
            with _client(self._settings) as client:
                client.set(self._presence_key, "1", ex=ABANDONED_SECONDS)
            state = self._queue.channel.state
            state.binding_delete(self._queue.name, AGENT_EVENTS.name, self._queue.routing_key)
        self._queue.declare()
        waiting = self._queue.queue_declare()
        if waiting and waiting.message_count > MAX_WAITING:
            self.dropped += self._queue.purge() or 0
        self._renewed_at = time.monotonic()

    def _fetch(self) -> list[WatchedEvent]:
        events: list[WatchedEvent] = []
        while len(events) < MAX_POLL:
            message = self._queue.get(no_ack=True, accept=["json"])
            if message is None:
                break
            events.append(self._event(message))
        return events

    def _event(self, message: Any) -> WatchedEvent:
        # An encoded chat key is one word.
        name = str(message.delivery_info.get("routing_key", "")).rpartition(".")[0]
        try:
            body = message.payload
        except (KombuError, ValueError):  # a foreign message in another format
            body = None
        return WatchedEvent(name=name, body=body if isinstance(body, dict) else {})

    def _disconnect(self) -> None:
        connection, self._connection, self._queue = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(*_AWAY):  # the connection is broken anyway
                connection.release()


def drop_abandoned(app: Celery, settings: BrokerSettings) -> int:
    """Delete the queues of watchers whose presence has expired; returns how many. Blocks.

    Raises:
        BrokerUnavailableError: the broker does not answer.
    """
    if settings.url is None or not is_redis(settings.url):
        return 0
    keys = Keys(prefix=settings.key_prefix)
    try:
        with app.connection_for_write() as connection, _client(settings) as client:
            channel = connection.default_channel
            watching = [
                row for row in channel.get_table(AGENT_EVENTS.name) if row[2].startswith(WATCH_PREFIX)
            ]
            abandoned = [
                row for row in watching if not client.exists(keys.watcher(row[2].removeprefix(WATCH_PREFIX)))
            ]
            for routing_key, pattern, queue in abandoned:
                delete_binding(channel, queue, AGENT_EVENTS.name, routing_key, pattern)
    except _AWAY as exc:
        raise unavailable(settings.url, exc) from exc
    return len(abandoned)


def _client(settings: BrokerSettings) -> redis.Redis:
    return RedisEndpoint(settings, settings.url).client()
