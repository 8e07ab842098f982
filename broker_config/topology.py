"""Exchanges, queues and routing keys.

One topic exchange, ``agent.events``, carries requests for rounds; one queue per lane carries tasks. The queue
of lane ``rounds`` is bound to the exchange, so a request for a round is both an event and a task.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from uuid import uuid4

from kombu.entity import Exchange, Queue

from broker_config.keys import pinned_queue
from broker_config.urls import is_redis
from nekro_agent.methods import Lane

if TYPE_CHECKING:
    from celery import Celery

__all__ = [
    "AGENT_EVENTS",
    "COMMAND_TASK",
    "DRAIN_TASK",
    "HOOK_TASK",
    "JOB_TASK",
    "ROUND_REQUESTED",
    "RUN_TASK",
    "count_waiting",
    "encode_chat_key",
    "lane_queue",
    "publish_round_requested",
    "rounds_waiting",
    "routing_key_for_chat",
    "sending_queue",
]

AGENT_EVENTS: Final = Exchange("agent.events", type="topic", durable=True)
ROUND_REQUESTED: Final = "round.requested"
#: Celery task that runs a chat's requested rounds; its only argument is the chat key.
DRAIN_TASK: Final = "nekro.rounds.drain"
#: Celery task that executes a background job; its only argument is the job id, which is also the task id.
JOB_TASK: Final = "nekro.jobs.run"
#: Celery task that runs one command line; the name has two parts, so no plugin method can have it.
COMMAND_TASK: Final = "nekro.command"
#: Celery task that runs one hook of a pinned plugin on the plugin's worker; two parts, as above.
HOOK_TASK: Final = "nekro.hook"
#: Celery task that runs code in a sandbox on lane ``rounds``; two parts, as above.
RUN_TASK: Final = "nekro.run"
#: AMQP allows 255 bytes for a whole routing key.
MAX_ENCODED_CHARS: Final = 180


def encode_chat_key(chat_key: str) -> str:
    """Encode a chat key as one word of a routing key, without a dot, ``#``, ``*`` or whitespace.

    Different chat keys give different words. Ordinary ones stay readable; one that would
    be too long becomes ``~`` and its SHA-256.
    """
    data = chat_key.encode("utf-8", "surrogatepass")
    word = quote(data, safe="").replace(".", "%2E").replace("~", "%7E")
    if word and len(word) <= MAX_ENCODED_CHARS:
        return word
    return f"~{hashlib.sha256(data).hexdigest()}"


def routing_key_for_chat(event: str, chat_key: str) -> str:
    """Return the routing key of a chat's event: ``<event>.<encoded chat key>``."""
    return f"{event}.{encode_chat_key(chat_key)}"


def lane_queue(lane: Lane, plugin_key: str | None = None, *, quorum: bool = False) -> Queue:
    """Return the queue of a lane or of a pinned plugin.

    Args:
        plugin_key: ``author.module`` of a pinned plugin: its queue is ``pinned.<plugin key>``.
        quorum: declare a RabbitMQ quorum queue; Redis ignores it.
    """
    name = lane.value if plugin_key is None else pinned_queue(plugin_key)
    arguments = {"x-queue-type": "quorum"} if quorum else None
    if plugin_key is None and lane is Lane.ROUNDS:
        return Queue(
            name,
            exchange=AGENT_EVENTS,
            routing_key=f"{ROUND_REQUESTED}.#",
            durable=True,
            queue_arguments=arguments,
        )
    return Queue(
        name,
        exchange=Exchange(name, type="direct", durable=True),
        routing_key=name,
        durable=True,
        queue_arguments=arguments,
    )


def sending_queue(app: Celery, name: str) -> Queue:
    """Return the queue of a lane or of a pinned plugin by its name; declared if this process has not yet."""
    if name not in app.amqp.queues:
        key = name.removeprefix(f"{Lane.PINNED.value}.")
        app.amqp.queues.add(lane_queue(Lane.METHODS, key, quorum=not is_redis(app.nekro_settings.broker.url)))
    return app.amqp.queues[name]


def count_waiting(queue: Queue, channel: Any) -> int:
    """Declare a queue and count its messages; blocks for two round trips to the broker."""
    bound = queue(channel)
    bound.declare()
    # Not passively: kombu does not prefix the name of the list in Redis then, and finds none.
    return int(bound.queue_declare().message_count)


def publish_round_requested(app: Celery, chat_key: str) -> None:
    """Publish a request to run a chat's rounds; blocks.

    The queue is bound again each time, because a Redis that lost its data has lost the binding too,
    and messages published before a worker restores it would be dropped.
    """
    queue = app.amqp.queues[Lane.ROUNDS.value]
    with app.producer_or_acquire() as producer:
        _bind_again(queue, producer.channel)
        message = app.amqp.signed_task(uuid4().hex, DRAIN_TASK, [chat_key], queue=queue.name)
        app.amqp.send_task_message(
            producer,
            DRAIN_TASK,
            message,
            exchange=AGENT_EVENTS.name,
            exchange_type=AGENT_EVENTS.type,
            routing_key=routing_key_for_chat(ROUND_REQUESTED, chat_key),
            declare=[],
        )


def rounds_waiting(app: Celery) -> int:
    """Return the number of messages in the queue of lane ``rounds``; blocks."""
    queue = app.amqp.queues[Lane.ROUNDS.value]
    with app.producer_or_acquire() as producer:
        return int(queue(producer.channel).queue_declare().message_count)


def _bind_again(queue: Queue, channel: Any) -> None:
    bound, state = queue(channel), getattr(channel, "state", None)
    if state is None:
        bound.declare()
        return
    # Virtual transports cache their bindings and would not send the same binding again. Their exchanges are
    # in memory, and their queues need no declaration, which would cost a round trip.
    state.binding_delete(queue.name, queue.exchange.name, queue.routing_key)
    bound.exchange.declare()
    bound.queue_bind()
