"""Connections to the broker that use our transports instead of kombu's own.

On brokers other than Redis, dead letters go to two queues, for the broker's own tools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kombu import Connection, Producer, Queue
from kombu.connection import ConnectionPool, PooledConnection
from kombu.transport import pyamqp
from kombu.transport import redis as stock

from broker_config.keys import DEAD_QUEUE, MAX_REFUSED_BYTES, REFUSED_HEADER, REFUSED_LIMIT, REFUSED_QUEUE
from nekro.broker.delivery.transport import COMPRESSED_TYPE, ClaimTransport, uncompressed

__all__ = [
    "ClaimConnection",
    "publish_dead",
]


class PlainAmqpMessage(pyamqp.Message):  # type: ignore[misc]
    """A RabbitMQ message that is never decompressed."""

    def __init__(self, msg: Any, channel: Any = None, **options: Any) -> None:
        if uncompressed(msg.properties.get("application_headers")):
            msg.properties["content_type"] = COMPRESSED_TYPE
        super().__init__(msg, channel=channel, **options)


class PlainAmqpChannel(pyamqp.Channel):  # type: ignore[misc]
    """A channel that delivers ``PlainAmqpMessage``."""

    Message = PlainAmqpMessage


class PlainAmqpConnection(pyamqp.Connection):  # type: ignore[misc]
    """A connection that opens ``PlainAmqpChannel``, and may bound the time of each answer."""

    Channel = PlainAmqpChannel

    def __init__(self, *args: Any, answer_seconds: float | None = None, **options: Any) -> None:
        """Create it.

        Args:
            answer_seconds: longest wait for an answer, for connections that only send; None waits for ever.
        """
        self._answer_seconds = answer_seconds
        super().__init__(*args, **options)

    def drain_events(self, timeout: float | None = None) -> None:
        """Wait for a frame.

        Raises:
            TimeoutError: none came. After ``answer_seconds`` the connection is closed too: a late answer
                would be taken for that to the next request.
        """
        try:
            super().drain_events(timeout=self._answer_seconds if timeout is None else timeout)
        except TimeoutError:
            if timeout is None:
                self.collect()
            raise


class PlainAmqpTransport(pyamqp.Transport):  # type: ignore[misc]
    """The transport for RabbitMQ, selected by ``ClaimConnection``."""

    Connection = PlainAmqpConnection


class PlainAmqpTlsTransport(pyamqp.SSLTransport):  # type: ignore[misc]
    """The same over TLS."""

    Connection = PlainAmqpConnection


#: Our transports for RabbitMQ, by kombu's.
_AMQP: Final[Mapping[Any, Callable[..., Any]]] = {
    pyamqp.Transport: PlainAmqpTransport,
    pyamqp.SSLTransport: PlainAmqpTlsTransport,
}


class PooledAmqpConnection(PooledConnection):  # type: ignore[misc]
    """A connection of a pool: to RabbitMQ with our transport, to Redis with kombu's, as it only sends."""

    def get_transport_cls(self) -> Callable[..., Any]:
        """Return the class of the transport."""
        found: Callable[..., Any] = super().get_transport_cls()
        return _AMQP.get(found, found)


class AmqpConnectionPool(ConnectionPool):  # type: ignore[misc]
    """A pool of ``PooledAmqpConnection``."""

    def new(self) -> PooledAmqpConnection:
        """Return a connection that is not open yet."""
        return PooledAmqpConnection(self, **dict(self.connection._info(resolve=False)))


class ClaimConnection(Connection):  # type: ignore[misc]
    """A connection whose transport decompresses nothing and, on Redis, claims messages.

    The broker's URL stays a standard one, which Flower and other programs understand.
    """

    def get_transport_cls(self) -> Callable[..., Any]:
        """Return the class of the transport."""
        found: Callable[..., Any] = super().get_transport_cls()
        if found in (stock.Transport, stock.SentinelTransport):
            return ClaimTransport
        return _AMQP.get(found, found)

    def Pool(self, limit: int | None = None, **options: Any) -> AmqpConnectionPool:
        """Return a pool of such connections."""
        return AmqpConnectionPool(self, limit, **options)


def publish_dead(channel: Any, message: Any, *, refused: str | None) -> None:
    """Publish a copy of a message to the dead queue or, with the reason, to the queue of refused messages.

    The body of a refused message is omitted if it is longer than ``MAX_REFUSED_BYTES``.
    """
    body, headers = message.body, dict(message.headers)
    if refused is None:
        queue = Queue(DEAD_QUEUE, durable=True, queue_arguments={"x-queue-type": "quorum"})
    else:
        headers = {name: headers[name] for name in ("id", "task") if isinstance(headers.get(name), str)}
        headers = {name: text[:255] for name, text in headers.items()} | {REFUSED_HEADER: refused}
        body = body if len(body) <= MAX_REFUSED_BYTES else b""
        queue = Queue(
            REFUSED_QUEUE,
            durable=True,
            queue_arguments={"x-max-length": REFUSED_LIMIT, "x-overflow": "drop-head"},
        )
    Producer(channel).publish(
        body,
        exchange="",
        routing_key=queue.name,
        declare=[queue],
        content_type=message.content_type if refused is None else "application/octet-stream",
        content_encoding=message.content_encoding if refused is None else "binary",
        headers=headers,
        **({} if refused is not None else _caller(message)),
    )


def _caller(message: Any) -> dict[str, str]:
    reply_to = (message.properties or {}).get("reply_to")
    return {"reply_to": reply_to} if reply_to else {}
