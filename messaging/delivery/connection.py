"""Connections to the broker that use our transports instead of kombu's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kombu import Connection
from kombu.transport import pyamqp
from kombu.transport import redis as stock

from messaging.delivery.transport import COMPRESSED_TYPE, ClaimTransport, uncompressed

__all__ = ["ClaimConnection"]


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
    """A connection that opens ``PlainAmqpChannel``."""

    Channel = PlainAmqpChannel


class PlainAmqpTransport(pyamqp.Transport):  # type: ignore[misc]
    """The transport for RabbitMQ, selected by ``ClaimConnection``."""

    Connection = PlainAmqpConnection


class ClaimConnection(Connection):  # type: ignore[misc]
    """A connection whose transport decompresses nothing and, on Redis, claims messages.

    The broker's URL stays a standard one, which Flower and other programs understand.
    """

    def get_transport_cls(self) -> Callable[..., Any]:
        """Return the class of the transport."""
        found: Callable[..., Any] = super().get_transport_cls()
        if found is pyamqp.Transport:
            return PlainAmqpTransport
        return ClaimTransport if found in (stock.Transport, stock.SentinelTransport) else found
