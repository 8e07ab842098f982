"""Publishes messages that announce rows to the server of their chat; every function blocks.

A message may be lost or sent twice: the sweep sends it again, and workers claim the row.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker_config.app import NekroApp
from broker_config.keys import Keys
from broker_config.topology import (
    JOB_TASK,
    count_waiting,
    publish_round_requested,
    rounds_waiting,
    sending_queue,
)
from nekro.broker.delivery.messages import CallMessage
from nekro.broker.publishing import IS_SERVED
from nekro_agent.methods import Lane

__all__ = [
    "count_of_lane",
    "request_overdue",
    "request_round",
    "send_call",
    "send_job",
    "send_lost",
]


def request_round(app: NekroApp, chat_key: str) -> None:
    """Announce that a chat has a requested round."""
    publish_round_requested(_serving(app, chat_key, Lane.ROUNDS.value), chat_key)


def request_overdue(app: NekroApp, chat_keys: Sequence[str]) -> int:
    """Announce waiting chats again, unless as many messages wait on their server; returns how many it did.

    Args:
        chat_keys: chats of one server.
    """
    by_server: dict[int, list[str]] = {}
    for chat_key in chat_keys:
        server = _serving(app, chat_key, Lane.ROUNDS.value).server
        by_server.setdefault(server, []).append(chat_key)
    sent = 0
    for server, chats in by_server.items():
        if rounds_waiting(app.servers[server]) >= len(chats):
            continue  # the workers are only behind
        for chat_key in chats:
            publish_round_requested(app.servers[server], chat_key)
        sent += len(chats)
    return sent


def send_job(app: NekroApp, job_id: str, chat_key: str) -> None:
    """Publish a job on lane ``long``."""
    lane = Lane.LONG.value
    server = _serving(app, chat_key, lane)
    message = app.amqp.signed_task(job_id, JOB_TASK, [job_id], queue=lane)
    with server.producer_or_acquire() as producer:
        server.amqp.send_task_message(producer, JOB_TASK, message, queue=sending_queue(server, lane))


def count_of_lane(app: NekroApp, lane: str) -> int:
    """Return how many messages wait in the queue of a lane on one server."""
    with app.producer_or_acquire() as producer:
        return count_waiting(sending_queue(app, lane), producer.channel)


def send_call(app: NekroApp, message: CallMessage) -> None:
    """Publish a recorded call that no caller waits for."""
    _send(_serving(app, message.invocation.chat_key, message.lane), [message])


def send_lost(app: NekroApp, messages: Sequence[CallMessage]) -> int:
    """Send calls again whose queue has no waiting messages; returns the number sent.

    Args:
        messages: calls of chats of one server.
    """
    by_queue: dict[tuple[int, str], list[CallMessage]] = {}
    for message in messages:
        server = _serving(app, message.invocation.chat_key, message.lane).server
        by_queue.setdefault((server, message.lane), []).append(message)
    sent = 0
    for (server, lane), group in sorted(by_queue.items()):
        one = app.servers[server]
        with one.producer_or_acquire() as producer:
            if count_waiting(sending_queue(one, lane), producer.channel):
                continue  # the workers are behind, and these messages may still be in the queue
        sent += _send(one, group)
    return sent


def _send(app: NekroApp, messages: Sequence[CallMessage]) -> int:
    with app.producer_or_acquire() as producer:
        for message in messages:
            app.amqp.send_task_message(
                producer,
                message.invocation.method,
                message.build(app),
                queue=sending_queue(app, message.lane),
            )
    return len(messages)


def _serving(app: NekroApp, chat_key: str, lane: str) -> NekroApp:
    """Return the application of the server that has the messages of a chat for a lane.

    As for ``CallServers.send``, that is the first server if no worker serves the lane on the others.
    """
    if len(app.servers) == 1 or lane.startswith(f"{Lane.PINNED.value}."):
        return app
    for number in app.chats.order(chat_key):
        if not number or _is_served(app.servers[number], lane):
            return app.servers[number]
    return app


def _is_served(app: NekroApp, lane: str) -> bool:
    broker = app.nekro_settings.broker
    key = Keys(prefix=broker.key_prefix).seen(lane)
    with app.producer_or_acquire() as producer, producer.channel.conn_or_acquire() as client:
        # execute_command bypasses kombu's key prefix, so the key includes it.
        return bool(client.execute_command("EVAL", IS_SERVED.text, 1, key, broker.visibility_timeout_seconds))
