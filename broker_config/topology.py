"""Exchanges, queues and routing keys.

One topic exchange, ``agent.events``, carries everything that happens; one queue per lane
carries tasks. The queue of lane ``rounds`` is bound to the exchange, so "a round is wanted"
is both an event and a task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote
from uuid import uuid4

from kombu.entity import Exchange, Queue
from kombu.exceptions import ChannelError

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
    "count_waiting",
    "encode_chat_key",
    "lane_queue",
    "publish_event",
    "publish_round_requested",
    "rounds_waiting",
    "routing_key_for_chat",
]

AGENT_EVENTS: Final = Exchange("agent.events", type="topic", durable=True)
ROUND_REQUESTED: Final = "round.requested"
#: Celery task that works off a chat's waiting rounds; its only argument is the chat key.
DRAIN_TASK: Final = "nekro.rounds.drain"
#: Celery task that executes a background job; its only argument is the job's id, which is its own id too.
JOB_TASK: Final = "nekro.jobs.run"
#: Celery task that runs one command line; two parts, so that no plugin's method has its name.
COMMAND_TASK: Final = "nekro.command"
#: Celery task that runs one hook of a pinned plugin where the plugin lives; two parts, as above.
HOOK_TASK: Final = "nekro.hook"
#: AMQP allows 255 bytes for a whole routing key.
MAX_ENCODED_CHARS: Final = 180


def encode_chat_key(chat_key: str) -> str:
    """Write any chat key as one word of a routing key: no dot, ``#``, ``*`` or blank in it.

    Different chat keys give different words. Ordinary ones stay readable; one that would
    get too long becomes ``~`` and its SHA-256.
    """
    data = chat_key.encode("utf-8", "surrogatepass")
    word = quote(data, safe="").replace(".", "%2E").replace("~", "%7E")
    if word and len(word) <= MAX_ENCODED_CHARS:
        return word
    return f"~{hashlib.sha256(data).hexdigest()}"


def routing_key_for_chat(event: str, chat_key: str) -> str:
    """Routing key of an event of one chat: ``<event>.<encoded chat key>``."""
    return f"{event}.{encode_chat_key(chat_key)}"


def lane_queue(lane: Lane, plugin_key: str | None = None, *, quorum: bool = False) -> Queue:
    """The queue of a lane, or the one of a pinned plugin.

    Args:
        plugin_key: ``author.module`` of a pinned plugin: its queue is ``pinned.<plugin key>``.
        quorum: declare a RabbitMQ quorum queue; Redis ignores it.
    """
    name = lane.value if plugin_key is None else f"pinned.{plugin_key}"
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


def count_waiting(queue: Queue, channel: Any) -> int:
    """Declare a queue and count what waits in it; blocks for two exchanges with the broker."""
    queue(channel).declare()
    try:
        return int(channel.queue_declare(queue.name, passive=True).message_count)
    except ChannelError:  # on Redis an empty list is none, which kombu takes for a missing queue
        return 0


def publish_event(
    app: Celery, event: str, chat_key: str, body: Mapping[str, Any], *, producer: Any = None
) -> None:
    """Publish a JSON event of a chat to ``agent.events``; blocks for one exchange with the broker.

    Declares the exchange in the publishing process: on Redis, kombu drops what goes to a
    topic exchange that this process has not declared, without an error.
    """
    with app.producer_or_acquire(producer) as used:
        used.publish(
            dict(body),
            exchange=AGENT_EVENTS,
            routing_key=routing_key_for_chat(event, chat_key),
            declare=[AGENT_EVENTS],
            serializer="json",
            retry=True,
            retry_policy=app.conf.task_publish_retry_policy,
        )


def publish_round_requested(app: Celery, chat_key: str, *, producer: Any = None) -> str:
    """Ask the rounds lane to look at a chat; returns the id of the task message. Blocks as above.

    The queue is bound again each time: a Redis that lost its data has forgotten the binding,
    and what is published before a worker restores it would reach nobody.
    """
    queue = app.amqp.queues[Lane.ROUNDS.value]
    with app.producer_or_acquire(producer) as used:
        _bind_again(queue, used.channel)
        task_id = uuid4().hex
        message = app.amqp.signed_task(task_id, DRAIN_TASK, [chat_key], queue=queue.name)
        app.amqp.send_task_message(
            used,
            DRAIN_TASK,
            message,
            exchange=AGENT_EVENTS.name,
            exchange_type=AGENT_EVENTS.type,
            routing_key=routing_key_for_chat(ROUND_REQUESTED, chat_key),
            declare=[],
        )
    return task_id


def rounds_waiting(app: Celery, *, producer: Any = None) -> int:
    """How many messages wait in the queue of lane ``rounds``; blocks as above."""
    queue = app.amqp.queues[Lane.ROUNDS.value]
    with app.producer_or_acquire(producer) as used:
        return int(queue(used.channel).queue_declare().message_count)


def _bind_again(queue: Queue, channel: Any) -> None:
    # Virtual transports remember what they bound and would send nothing a second time.
    state = getattr(channel, "state", None)
    if state is not None:
        state.binding_delete(queue.name, queue.exchange.name, queue.routing_key)
    queue(channel).declare()
