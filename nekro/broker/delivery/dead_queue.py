"""Dead-letters messages on brokers other than Redis: two queues, for the broker's own tools."""

from __future__ import annotations

from typing import Any

from kombu import Producer, Queue

from broker_config.keys import DEAD_QUEUE, MAX_REFUSED_BYTES, REFUSED_HEADER, REFUSED_LIMIT, REFUSED_QUEUE

__all__ = ["publish_dead"]


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
