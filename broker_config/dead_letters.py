"""Messages that were set aside: list, retry, drop. They wait in the broker for an operator.

On Redis they are a list, raw as they came; on RabbitMQ a queue, ``nekro.dead``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from broker_config.app import NekroApp
from broker_config.call_messages import CallMessage
from broker_config.keys import Keys
from broker_config.publishing import encode_message, unavailable
from broker_config.transport import DELIVERIES_HEADER, deliveries
from broker_config.urls import client_url, is_redis
from broker_config.wire import Signer
from nekro_agent.errors import MessageRefusedError, UsageError

__all__ = ["DeadLetters", "DeadMessage"]

#: Begins the id of a message that says no id itself.
RAW_PREFIX: Final = "raw-"


@dataclass(frozen=True, kw_only=True)
class DeadMessage:
    """One message; its arguments are not shown."""

    #: The task's id, which is the call's; for unreadable ones made from the content.
    id: str
    #: None: the message cannot be read as a task.
    task: str | None
    #: Queue that it came from; None: unknown.
    lane: str | None
    #: Workers that took it and did not finish it.
    deliveries: int
    size_bytes: int
    raw: bytes

    @property
    def reason(self) -> str:
        """Why it is here."""
        if self.task is None:
            return "no worker can read it"
        return f"{self.deliveries} workers took it and none finished it"


class DeadLetters:
    """The dead list of one Redis; blocking. Every method raises BrokerUnavailableError."""

    def __init__(self, app: NekroApp, *, signer: Signer) -> None:
        """Connect to nothing yet.

        Raises:
            UsageError: the broker is no Redis.
        """
        settings = app.nekro_settings.broker
        if settings.url is None or not is_redis(settings.url):
            raise UsageError("this broker keeps dead messages in its queue nekro.dead; use its own tools")
        self._app, self._signer, self._url = app, signer, settings.url
        self._prefix, self._key = settings.key_prefix, Keys(prefix=settings.key_prefix).dead
        self._client = redis.Redis.from_url(
            client_url(settings.url),
            socket_timeout=settings.socket_timeout_seconds,
            socket_connect_timeout=settings.connect_timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )

    def newest(self, *, limit: int) -> list[DeadMessage]:
        """List messages, the newest first."""
        try:
            found: Any = self._client.lrange(self._key, 0, limit - 1)
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, exc) from exc
        return [_read(raw) for raw in found]

    def drop(self, message: DeadMessage) -> bool:
        """Delete a message; False when somebody else did."""
        try:
            removed: Any = self._client.lrem(self._key, 1, message.raw)  # type: ignore[arg-type]
            return bool(removed)
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, exc) from exc

    def retry(self, message: DeadMessage, *, timeout_seconds: float) -> str:
        """Put a message back into its queue, as if it was sent now; returns the queue.

        Raises:
            UsageError: it cannot be read, or its queue is not known here.
        """
        lane = message.lane
        if message.task is None or lane is None or lane not in self._app.amqp.queues:
            raise UsageError(f"message {message.id} cannot be sent again: {message.reason}; drop it")
        again = self._fresh(json.loads(message.raw), lane, timeout_seconds)
        try:
            with self._client.pipeline(transaction=True) as pipe:
                pipe.lrem(self._key, 1, message.raw)  # type: ignore[arg-type]
                pipe.lpush(f"{self._prefix}{lane}", again)
                pipe.execute()
        except (redis.RedisError, OSError) as exc:
            raise unavailable(self._url, exc) from exc
        return lane

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _fresh(self, message: dict[str, Any], lane: str, timeout_seconds: float) -> bytes:
        try:
            invocation = self._signer.verify(json.loads(message["body"])[0][0])
        except (MessageRefusedError, LookupError, TypeError, ValueError):
            # No call of a method: a round or a job, whose row knows more.
            headers = {**message["headers"], "expires": None}
            headers.pop(DELIVERIES_HEADER, None)
            return json.dumps({**message, "headers": headers}).encode()
        call = CallMessage.renewed(
            invocation, signer=self._signer, lane=lane, timeout_seconds=timeout_seconds
        )
        return encode_message(call.build(self._app), queue=lane)


def _read(raw: bytes) -> DeadMessage:
    unreadable = DeadMessage(
        id=f"{RAW_PREFIX}{hashlib.sha256(raw).hexdigest()[:12]}",
        task=None,
        lane=None,
        deliveries=0,
        size_bytes=len(raw),
        raw=raw,
    )
    try:
        message = json.loads(raw)
        headers, info = message["headers"], message["properties"]["delivery_info"]
        task_id, task = headers["id"], headers["task"]
    except (TypeError, ValueError, LookupError):
        return unreadable
    if not isinstance(headers, Mapping) or not isinstance(task_id, str) or not isinstance(task, str):
        return unreadable
    return DeadMessage(
        id=task_id,
        task=task,
        lane=str(info.get("routing_key")) if isinstance(info, Mapping) else None,
        deliveries=deliveries(headers),
        size_bytes=len(raw),
        raw=raw,
    )
